"""The `headrace` command line."""

from typing import Any

import typer
from typer.core import TyperGroup

from headrace.cli.bench import bench
from headrace.cli.doctor import doctor
from headrace.cli.envelope import envelope
from headrace.cli.models import models
from headrace.cli.run import run
from headrace.cli.serve import serve
from headrace.errors import HeadraceError


class _Commands(TyperGroup):
    """Turns our errors into one message on stderr and exit code 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except HeadraceError as error:
            typer.echo(f"headrace: {error.message}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Serves language models larger than memory.",
)
app.command()(serve)
app.command()(run)
app.command()(envelope)
app.command()(doctor)
app.add_typer(models, name="models")
app.add_typer(bench, name="bench")
