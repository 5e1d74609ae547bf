"""Puts the service together."""

from contextlib import AsyncExitStack

from sandbox_client import SandboxClient
from service_kit.cli import run_until_signal
from service_kit.errors import StartupError
from service_kit.server import Server
from service_kit.telemetry import setup_telemetry

from swe_eval.atif import Decoder
from swe_eval.config import EvalConfig
from swe_eval.errors import TaskSetError
from swe_eval.evaluate import Evaluator
from swe_eval.grading.run import Grader
from swe_eval.grading.sandboxes import ServiceHost
from swe_eval.metrics import register_gauges
from swe_eval.service import EvalServicer, eval_service
from swe_eval.tasks.sets import open_task_sets


async def serve(config: EvalConfig) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises:
        StartupError: a task set, port or setting can't be used.
    """
    telemetry = setup_telemetry(config.telemetry, "swe-eval")
    try:
        async with AsyncExitStack() as stack:
            await run_until_signal(await assemble(config, stack))
    finally:
        telemetry.shutdown()


async def assemble(config: EvalConfig, stack: AsyncExitStack) -> Server:
    """Makes the server; `stack` gets what must be closed after it.

    Raises:
        StartupError: a task set or the tokenizer can't be used.
    """
    try:
        catalog = open_task_sets(config.task_sets, config.decontamination)
    except TaskSetError as error:
        raise StartupError(str(error)) from error
    grading = config.grading
    client = await stack.enter_async_context(
        SandboxClient(config.sandbox, owner="swe-eval", call_timeout_s=grading.call_timeout_s)
    )
    host = ServiceHost(client, start_timeout_s=grading.start_timeout_s)
    grader = Grader(host, grading)
    register_gauges(grader)
    decoder = Decoder.from_folder(config.evaluation.tokenizer)
    evaluator = Evaluator(catalog, config.evaluation, decoder=decoder)
    servicer = EvalServicer(catalog, grader, evaluator, config)
    return Server(config.server, [eval_service(servicer)])
