"""The README as the package index shows it, where no file of the repository stands beside it.

Its links lead to files of the repository. A released package has the public address of the project
in ``[project.urls]`` of pyproject.toml, and the links then lead there. Until then a link becomes
its text with the name of the file behind it, and the picture is left out.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<file>(?!\w+:)[^)\s]+)\)")


def standing_alone(page: str, address: str = "") -> str:
    """Make links to files absolute, or say which file each one leads to.

    >>> standing_alone("See [the pages](docs/index.md). ![A page](a.png)")
    'See the pages (docs/index.md). '
    >>> standing_alone("[Home](https://example.org), [examples](examples)", "https://host/project")
    '[Home](https://example.org), [examples](https://host/project/examples)'
    >>> standing_alone("![A page](a.png)", "https://host/project/blob/v1")
    '![A page](https://host/project/raw/v1/a.png)'
    """

    def link(found: re.Match[str]) -> str:
        text, file = found["text"], found["file"]
        if found["picture"]:  # hosts of code show the file itself under "raw"
            return f"![{text}]({address.replace('/blob/', '/raw/')}/{file})" if address else ""
        if address:
            return f"[{text}]({address}/{file})"
        return text if text == file else f"{text} ({file})"

    return LINK.sub(link, page)


class CustomMetadataHook(MetadataHookInterface):
    """Write the long description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Put the README, with links that work alone, into the metadata."""
        page = Path(self.root, "README.md").read_text(encoding="utf-8")
        address = metadata.get("urls", {}).get("Files", "")
        text = standing_alone(page, address.rstrip("/"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
