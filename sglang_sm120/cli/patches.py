"""``sglang-sm120 patches``: the patches for upstream projects, and putting them into an SGLang on disk."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_sm120.errors import PatchError

if TYPE_CHECKING:
    from sglang_sm120.upstream.target import Target

app = typer.Typer(
    name="patches",
    help="Patches for upstream projects, for people who cannot install a plugin: look at them, apply them to an SGLang "
    "on disk, take them back. The package itself needs none.",
    no_args_is_help=True,
)

TargetOption = Annotated[
    Path | None,
    typer.Option(
        "--target",
        help="The SGLang to work on: site-packages, the folder sglang in it, or a source tree. "
        "Without it, the one that `import sglang` would take.",
        show_default=False,
    ),
]


@app.command("list")
def list_patches(target: TargetOption = None) -> None:
    """List every patch, and how the SGLang on disk stands."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    from sglang_sm120.upstream.catalog import load_catalog
    from sglang_sm120.upstream.operations import inspect

    catalog = load_catalog()
    found = _find(target, required=target is not None)
    status = inspect(found, catalog) if found is not None else None
    here = () if status is None or status.release is None else [p.name for p in catalog.series(status.release)]
    # Folded, not cut: the name is what `show` takes.
    table = Table(Column("patch", overflow="fold"), "what it does", "here", pad_edge=False)
    for patch in catalog.patches:
        applied = status is not None and patch.name in status.patches
        table.add_row(patch.name, escape(patch.subject), "applied" if applied else "fits" if patch.name in here else "")
    console = Console()
    console.print(table)
    if found is None or status is None:
        console.print("No SGLang was found here; --target names one.")
        return
    detail = f" ({status.detail})" if status.detail else ""
    console.print(escape(f"SGLang {status.release or '?'} in {found.package}: {status.condition}{detail}"))


@app.command()
def show(name: Annotated[str, typer.Argument(help="As `list` shows it, or a part of it that no other has.")]) -> None:
    """Print one patch, as `git am` takes it."""
    from sglang_sm120.upstream.catalog import load_catalog

    typer.echo(load_catalog().find(name).text, nl=False)


@app.command()
def apply(
    target: TargetOption = None,
    check: Annotated[bool, typer.Option("--check", help="Say what would be done and change nothing.")] = False,
) -> None:
    """Apply all patches for this release: all or none. Stop servers that use it first."""
    from sglang_sm120.upstream import operations
    from sglang_sm120.upstream.catalog import load_catalog

    found, catalog = _require(target), load_catalog()
    change = operations.check(found, catalog) if check else operations.apply(found, catalog)
    for patch in change.series:
        typer.echo(f"{patch.name}  {patch.subject}")
    done = "would change" if check else "changed"
    typer.echo(f"SGLang {change.release} in {found.package}: {len(change.contents)} files {done}")


@app.command()
def revert(target: TargetOption = None) -> None:
    """Put every file back as it was before `apply`, byte for byte."""
    from sglang_sm120.upstream import operations

    found = _require(target)
    state = operations.revert(found)
    if state is None:
        typer.echo(f"SGLang in {found.package} is not patched")
    else:
        typer.echo(f"SGLang {state.release} in {found.package}: {len(state.files)} files restored")


def _require(target: Path | None) -> Target:
    found = _find(target, required=True)
    assert found is not None
    return found


def _find(target: Path | None, *, required: bool) -> Target | None:
    from sglang_sm120.host.source_probe import package_root
    from sglang_sm120.upstream.target import find_target

    folder = target or package_root()
    if folder is not None:
        return find_target(folder)
    if required:
        raise PatchError("No SGLang is installed here; --target names the one to work on.")
    return None
