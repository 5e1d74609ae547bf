"""`python -m tailrace_cli` is the `tailrace` command."""

from tailrace_cli.cli import main

if __name__ == "__main__":
    main()
