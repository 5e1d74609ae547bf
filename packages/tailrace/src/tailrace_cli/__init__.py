"""The `tailrace` command.

tailrace demo                  train a tiny coding agent on this machine, and see it get better
tailrace up                    start every service of a stack file and keep it running
tailrace status                services, versions, queues and limits of a running stack
tailrace doctor                what this host lacks, and how to mend it
tailrace report RUN_FOLDER     write a run's HTML report again
"""

__all__: list[str] = []
