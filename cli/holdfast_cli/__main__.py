"""`python -m holdfast_cli` is `holdfast`."""

from holdfast_cli.main import app

app(prog_name="holdfast")
