#!/usr/bin/env python
"""Django's command line: ``python -m testproject.manage <command>``, from the project's root."""

import os
import sys

from django.core.management import execute_from_command_line


def main() -> None:
    """Run the command in sys.argv against the settings of the environment."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    execute_from_command_line(sys.argv)


if __name__ == "__main__":
    main()
