"""`headrace models`."""

from pathlib import Path
from typing import Annotated

import typer

from headrace.errors import CheckpointCorrupt
from headrace.sizes import format_bytes, parse_bytes

models = typer.Typer(no_args_is_help=True, help="Fetch, find, make and check models.")


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


@models.command()
def widen(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A model directory, or demo.")],
    size: Annotated[str, typer.Option("--bytes", help="Of the new weights: 4G, 1500M, ...")],
    output: Annotated[
        Path | None, typer.Option(help="The new directory.", show_default="DIR-SIZE")
    ] = None,
) -> None:
    """Make a large model that gives the same answers, to measure with; print its directory."""
    from headrace.catalog.resolve import model_path
    from headrace.catalog.widen import widen as write_widened

    source, num_bytes = model_path(name), parse_bytes(size)
    directory = output or source.with_name(f"{source.name}-{size}")
    typer.echo(f"writing {format_bytes(num_bytes)} to {directory}", err=True)
    write_widened(source, directory, num_bytes=num_bytes)
    typer.echo(directory)


@models.command()
def verify(
    name: Annotated[str, typer.Argument(metavar="DIR", help="A model directory, or demo.")],
    update: Annotated[
        bool, typer.Option("--update", help="Write the manifest anew, from the files as they are.")
    ] = False,
) -> None:
    """Compare a model's files with its manifest, or write the manifest where there is none.

    A model that has one is checked whenever it is served, as its weights are read the first time.
    """
    from headrace.catalog.resolve import model_path
    from headrace.cli.progress import verify_reporter
    from headrace.model.checkpoint import Checkpoint
    from headrace.model.manifest import FILE_NAME, Manifest

    directory = model_path(name)
    manifest = None if update else Manifest.load(directory)
    with verify_reporter() as reporter:
        if manifest is None:
            manifest, differences = Manifest.of(Checkpoint.open(directory), reporter.progress), []
            manifest.write(directory)
            done = "wrote"
        else:
            differences = manifest.differences(directory, reporter.progress)
            done = "all as in"
    for difference in differences:
        typer.echo(difference)
    if differences:
        raise CheckpointCorrupt(
            f"the model is not what {FILE_NAME} says: fetch it again, or, if it was changed on "
            "purpose, run this with --update"
        )
    typer.echo(f"{done} {FILE_NAME}: {manifest.summary}")
