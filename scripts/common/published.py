"""Public data sets that a YAML file of conf/ describes: where one is, and how its rows
are had: from the Hugging Face hub by the `datasets` library, or from a copy on this disk.
Code of a repository is never run.

A copy is a file, or a folder with NAME.jsonl (.json, .parquet, .csv) or a folder NAME, or the
folder of the set itself, as `hf download` leaves it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from yaml import YAMLError

from outrider.conf.errors import UserError
from outrider.conf.rules import ZeroOrMore
from outrider.conf.typed import from_json, raise_all

FORMS = (".jsonl", ".json", ".parquet", ".csv")


@dataclass(frozen=True)
class Published:
    """A public set. word, place: how messages name such a set and the key of its copy on
    disk."""

    word, place = "set", "path"

    # its name in reports
    name: str = "own"
    # repository of the hub; empty = the set is not there, and `path` is needed
    dataset: str = ""
    # its configuration, where it has several
    config: str = ""
    # files of the repository, where it is no data set of the library's own kind
    files: str = ""
    # which part of it
    split: str = "train"
    # commit of the repository; empty = the newest, and the sha256 identifies it
    revision: str = ""
    # under which licence it was published
    licence: str = ""
    # a file or folder on this disk in place of the hub
    path: str = ""
    # column of more text below a prompt, where that is not empty
    more: str = ""
    # prompts that are asked unless the command says otherwise; 0 = all
    take: ZeroOrMore = 0
    # whether this description has been tried on the real set; where not, it is said
    tried: bool = False

    def below(self, text: str, row: dict[str, Any]) -> str:
        """Return a row's text with that of `more` below it."""
        more = row[self.more] if self.more else ""
        return f"{text}\n\n{more}" if isinstance(more, str) and more.strip() else text


P = TypeVar("P", bound=Published)


def described(path: Path, schema: type[P]) -> P:
    """Return the set that a YAML file describes. Raises UserError for one that is none."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path))
    except (OSError, ValueError, YAMLError) as error:
        raise UserError(f"{schema.word}: {path}: {' '.join(str(error).split())[:200]}") from None
    found, problems = from_json(content, schema)
    raise_all([f"{schema.word}: {path}: {problem}" for problem in problems])
    return found


def rows_of(which: Published, columns: Iterable[str]) -> Any:
    """Return the rows of a set, a datasets.Dataset of these columns ("" is none of them). Raises
    UserError for a set that cannot be had, or lacks one of them."""
    import datasets

    try:
        rows: Any = datasets.load_dataset(**_where(which))
    except UserError:
        raise
    except Exception as error:  # the library raises what its file systems and parsers do
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{which.word}: {which.name}: {which.path or which.dataset} could not be loaded "
            f"({type(error).__name__}: {reason}); {which.place}=FILE takes a copy on this disk"
        ) from None
    wanted = list(dict.fromkeys(filter(None, columns)))
    if lacking := [column for column in wanted if column not in rows.column_names]:
        there = ", ".join(rows.column_names[:8]) or "none"
        raise UserError(
            f"{which.word}: {which.name} has no column {lacking[0]!r} (its columns: {there}); "
            f"another version of the set? {which.place}=FILE takes a copy on this disk"
        )
    return rows.select_columns(wanted)


def copies(which: Published, folder: Path) -> list[Path]:
    """Return what bears the set's name in a folder."""
    named = [folder / f"{which.name}{ending}" for ending in FORMS] + [folder / which.name]
    return [path for path in named if path.exists()]


def _where(which: Published) -> dict[str, Any]:
    """Arguments of datasets.load_dataset."""
    if which.path:
        return _on_disk(which)
    if not which.dataset:
        raise UserError(
            f"{which.word}: {which.name}: is on no hub; give {which.place}=FILE (the YAML that "
            "describes it says where it is published)"
        )
    revision = which.revision or None
    if which.files:
        at = f"@{revision}" if revision else ""
        files = f"hf://datasets/{which.dataset}{at}/{which.files}"
        return {"path": "json", "data_files": files, "split": "train"}
    name = which.config or None
    return {"path": which.dataset, "name": name, "revision": revision, "split": which.split}


def _on_disk(which: Published) -> dict[str, Any]:
    """Return the file `path`, or what bears the set's name in that folder, or the folder as it
    was downloaded."""
    place = Path(which.path).expanduser().absolute()  # "." has no name, which the library wants
    if place.is_dir():
        place = next(iter(copies(which, place)), place)
    if not place.exists():
        raise UserError(f"{which.place}: {which.path} is not there; give a file or a folder")
    if place.is_file() and place.suffix.lower() not in FORMS:
        raise UserError(f"{which.place}: {place} is none of {', '.join(FORMS)}; convert it")
    # Files by their folder: by the name of their form the library would report the use of it.
    if place.is_file():
        return {"path": str(place.parent), "data_files": place.name, "split": "train"}
    if which.files:
        return {"path": str(place), "data_files": which.files, "split": "train"}
    import datasets

    known = datasets.get_dataset_config_names(str(place))  # a copy may have one part alone
    name = which.config if which.config in known else None
    return {"path": str(place), "name": name, "split": which.split}
