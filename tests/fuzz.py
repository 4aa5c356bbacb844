"""The fuzz tests without end, guided by what code they reach: `python -m tests.fuzz TEST [arguments of libFuzzer]`.

    uv pip install atheris                                          # Linux, and not among the dependencies: 33 MB
    python -m tests.fuzz key_templates -max_total_time=60

TEST is the name of a test in `tests.test_fuzz` that needs no server, without its ``test_``.
"""

import os
import sys
from types import FunctionType
from typing import Any


def main() -> None:
    """Run one test on inputs that atheris makes up, until it fails."""
    import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import django

    os.environ.setdefault("MONGODB_URI", "mongodb://127.0.0.1:9/?directConnection=true")
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    with atheris.instrument_imports(include=["django_mongolock"]):
        django.setup()
        from tests import test_fuzz
    tests: dict[str, Any] = {
        name.removeprefix("test_"): test
        for name, test in vars(test_fuzz).items()
        if isinstance(test, FunctionType) and hasattr(test, "hypothesis")
    }
    if sys.argv[1:2] not in [[name] for name in tests]:
        sys.exit(f"usage: python -m tests.fuzz {{{','.join(tests)}}} [arguments of libFuzzer]")
    atheris.Setup(sys.argv[:1] + sys.argv[2:], tests[sys.argv[1]].hypothesis.fuzz_one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
