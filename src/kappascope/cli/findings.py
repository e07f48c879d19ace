"""``kappascope findings``: write what runs found into the documentation."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from kappascope.cli._laboratory import every_experiment, require_laboratory, write_files
from kappascope.cli._options import Debug
from kappascope.cli._terminal import counted, loading, say, tell, waiting
from kappascope.refusal import Refusal
from kappascope.system.workers import Here
from kappascope.text import clean


def findings(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of results.")],
    docs: Annotated[Path, typer.Option(help="Folder of the pages to write.")] = Path("docs"),
    debug: Debug = False,
) -> None:
    """Write what runs found, and their answers to the paper's review, into the documentation.

    Nothing is run: the trials in the folders are judged and drawn anew, reports and all. A sentence
    of the article that the trials do not bear out is left out, and told of here.

    For example:
      kappascope findings results/reproduce results/studies/gpt
    """
    require_laboratory()
    with loading():
        from kappascope.lab import markdown
        from kappascope.lab.report import publications_of
        from kappascope.paper import docs as pages_of
        from kappascope.paper.article import ARTICLE
        from kappascope.system.files import write
        from kappascope.system.store import Store

    for folder in folders:
        if not (folder / "trials.parquet").is_file():
            advice = "name a folder that reproduce or study has filled"
            raise Refusal(2, str(folder), "holds no results", advice)
    publications = publications_of(folders, every_experiment(), counted)
    try:
        with waiting("Writing the article and the pages"):
            pages, pictures, left_out = pages_of.pages(publications, docs)
    except (OSError, ValueError) as error:
        raise Refusal(2, str(docs), str(error), "name the folder of the documentation") from error
    for each in publications:
        with Store(each.folder).lock() if (each.folder / "lock").exists() else nullcontext():
            write_files(each.folder, each.files(Here(), ARTICLE, counted))
    if any(each.studies for each in publications):
        pages[docs / "studies.md"] = markdown.studies_page(publications)
        pictures += markdown.study_pictures(publications)
    for path, text in pages.items():
        write(path, text.encode())
    write_files(docs, pictures)
    for reason in left_out:
        say(f"left out of the article: {clean(reason)}")
    tell(f"Written: {clean(', '.join(str(path) for path in pages))}")
