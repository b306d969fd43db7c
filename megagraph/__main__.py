"""``python -m megagraph``, and the command."""

import sys


def main() -> None:
    """The command line, or what it lacks."""
    try:
        from megagraph import cli
    except ModuleNotFoundError as error:
        print(f"megagraph: error: the command line needs {error.name}; pip install 'megagraph[train]'", file=sys.stderr)
        raise SystemExit(1) from None
    cli.main()


if __name__ == "__main__":
    main()
