import statistics

import pytest
from sandbox_client.config import DelayConfig, FaultConfig
from sandbox_client.errors import InjectedFault, is_infrastructure
from sandbox_client.faults import DelayInjector, FaultInjector


def fails(injector: FaultInjector, name: str) -> bool:
    try:
        injector.on_create(name)
    except InjectedFault:
        return True
    return False


def failures(injector: FaultInjector, names: list[str]) -> list[str]:
    return [name for name in names if fails(injector, name)]


def test_an_injected_fault_counts_as_a_fault_of_the_infrastructure() -> None:
    with pytest.raises(InjectedFault) as caught:
        FaultInjector(FaultConfig(exec_rate=1.0)).on_exec("sandbox")
    assert is_infrastructure(caught.value)
    assert caught.value.retryable


NAMES = [f"key-{n}" for n in range(2000)]


def test_about_the_configured_share_fails() -> None:
    assert len(failures(FaultInjector(FaultConfig(create_rate=0.1)), NAMES)) == pytest.approx(
        200, abs=50
    )


def test_the_same_seed_picks_the_same_ones_in_any_order() -> None:
    config = FaultConfig(create_rate=0.3, seed=7)
    assert sorted(failures(FaultInjector(config), NAMES)) == sorted(
        failures(FaultInjector(config), NAMES[::-1])
    )
    assert failures(FaultInjector(config), NAMES) != failures(
        FaultInjector(FaultConfig(create_rate=0.3, seed=8)), NAMES
    )


def test_a_retry_is_drawn_anew() -> None:
    injector = FaultInjector(FaultConfig(create_rate=0.5))
    assert 20 < len(failures(injector, ["same"] * 100)) < 80


def test_without_a_rate_nothing_fails() -> None:
    injector = FaultInjector(FaultConfig())
    assert failures(injector, NAMES) == []
    injector.on_exec("x")


def test_waits_are_log_normal_and_fixed_for_a_sandbox() -> None:
    injector = DelayInjector(DelayConfig(median_s=2.0, sigma=1.0, max_s=1e9))
    waits = [injector.wait_s(name) for name in NAMES]
    assert statistics.median(waits) == pytest.approx(2.0, rel=0.15)
    assert max(waits) > 10 * statistics.median(waits)
    assert injector.wait_s("key-1") == waits[1]


def test_waits_can_be_drawn_for_every_command() -> None:
    injector = DelayInjector(DelayConfig(median_s=1.0, per_sandbox=False))
    first = [injector.wait_s("a") for _ in range(3)]
    assert len(set(first)) == 3
    injector.forget("a")
    assert injector.wait_s("a") == first[0]


def test_the_longest_wait_is_bounded_and_none_is_the_default() -> None:
    bounded = DelayInjector(DelayConfig(median_s=5.0, sigma=3.0, max_s=6.0))
    assert max(bounded.wait_s(name) for name in NAMES) == 6.0
    assert DelayInjector(DelayConfig()).wait_s("a") == 0.0
