"""`python -m llminfer`."""

from llminfer.cli.app import main

main()
