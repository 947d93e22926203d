"""`headrace models`."""

from typing import Annotated

import typer

models = typer.Typer(no_args_is_help=True, help="Fetch and find models.")


@models.command()
def fetch(name: Annotated[str, typer.Argument(help="demo or a hub id.")]) -> None:
    """Get a model and print its directory; an interrupted fetch goes on where it stopped."""
    from headrace.catalog.resolve import resolve_target
    from headrace.cli.progress import fetch_reporter

    with fetch_reporter() as reporter:
        directory = resolve_target(name, reporter)
    typer.echo(directory)


@models.command()
def path(name: Annotated[str, typer.Argument(help="demo or demo-draft.")]) -> None:
    """Print the directory of a model that is fetched already."""
    from headrace.catalog.resolve import model_path

    typer.echo(model_path(name))
