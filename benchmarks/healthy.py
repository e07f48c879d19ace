"""What the clinic says of healthy published checkpoints, and the atlas that is made of them.

``python benchmarks/healthy.py`` diagnoses every checkpoint of `CHECKPOINTS` and judges each with an
atlas of the others, so that no model is compared with itself. It counts the findings that say
that nothing is to be done and lists every warning; results go to ``results/healthy.json``.
``--atlas`` also writes the atlas of the package, of the checkpoints marked for it.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from safetensors.torch import save_file

from kappascope.clinic.atlas import Atlas, atlas_of
from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.surveys import Surveyed, is_trained
from kappascope.lab.downloads import DOWNLOADS, fetch
from kappascope.studies.pretrained.model import llama2c
from kappascope.system.files import environment

RESULTS = Path(__file__).parent / "results" / "healthy.json"
PACKAGED = Path(__file__).parents[1] / "src" / "kappascope" / "clinic" / "atlas.json"


@dataclass(frozen=True)
class Published:
    """A checkpoint that people use: its download, its file there, and its licence."""

    name: str
    download: str
    file: str
    licence: str
    packaged: bool = True  # it is in the atlas; copies and fractions of others are not


CHECKPOINTS = (
    Published("stories15M", "stories15m", "", "MIT"),
    Published("all-MiniLM-L6-v2", "minilm", "", "Apache-2.0"),
    Published("all-MiniLM-L6-v2 in float16", "minilm-fp16", "", "Apache-2.0", packaged=False),
    Published("rxnmapper ALBERT", "albert", "", "MIT"),
    Published("CREPE tiny", "crepe", "tiny.pth", "MIT"),
    Published("CREPE full", "crepe", "full.pth", "MIT"),
    Published("Silero VAD", "silero", "", "MIT"),
    Published("MTCNN P-Net", "facenet", "pnet.pt", "MIT"),
    Published("MTCNN R-Net", "facenet", "rnet.pt", "MIT"),
    Published("MTCNN O-Net", "facenet", "onet.pt", "MIT"),
    Published("Resemblyzer", "resemblyzer", "", "Apache-2.0"),
    Published("LPIPS alex", "lpips", "alex.pth", "BSD-2-Clause", packaged=False),
    Published("LPIPS squeeze", "lpips", "squeeze.pth", "BSD-2-Clause", packaged=False),
    Published("LPIPS vgg", "lpips", "vgg.pth", "BSD-2-Clause", packaged=False),
)


def diagnosed(one: Published, folder: Path) -> Diagnosis:
    """Diagnose a checkpoint, of llama2.c's own format after a conversion."""
    path = fetch(one.download)
    if one.download == "stories15m":
        net, _ = llama2c(path.read_bytes())
        tensors = {name: tensor.contiguous() for name, tensor in net.state.items()}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(dict(net.config)))
        path = folder
    return diagnose(path / one.file if one.file else path, atlas=Atlas({}))


def others_atlas(found: dict[str, Diagnosis], name: str) -> Atlas:
    """The atlas of all models but those of the same download."""
    family = next(one.download for one in CHECKPOINTS if one.name == name).partition("-")[0]
    apart = [one.name for one in CHECKPOINTS
             if one.packaged and one.download.partition("-")[0] != family]  # fmt: skip
    return atlas_of(
        (other, [row for row in found[other].analysed if is_trained(row)], found[other].products)
        for other in apart
    )


def packaged_atlas(found: dict[str, Diagnosis]) -> Atlas:
    """The atlas of the package, with the package, licence and digest of every source."""
    kept = [one for one in CHECKPOINTS if one.packaged]
    whole = Surveyed.of([replace(found[one.name], source=one.name) for one in kept]).atlas
    sources = []
    for one, source in zip(kept, whole.sources, strict=True):
        download = DOWNLOADS[one.download]
        files = [asdict(file) for file in download.files if not one.file or file.name == one.file]
        more = {"package": f"{download.tool} {download.package}", "licence": one.licence}
        sources.append({**source, **more, "files": files})
    return replace(whole, sources=tuple(sources))


def main() -> None:
    """Diagnose all, judge each by the others, and write what was said."""
    found: dict[str, Diagnosis] = {}
    with tempfile.TemporaryDirectory() as folder:
        for one in CHECKPOINTS:
            found[one.name] = diagnosed(one, Path(folder))
            print(one.name, len(found[one.name].matrices), flush=True)
    rows, concerns, warnings = [], Counter[str](), []
    for name, plain in found.items():
        judged = replace(plain, atlas=others_atlas(found, name)).judged()
        counts = Counter(finding.concern for finding in judged.findings)
        concerns += counts
        said = [[f.rule, f.subject, f.evidence] for f in judged.findings if f.severity != "info"]
        warnings += said
        rows.append({"model": name, "matrices": len(judged.matrices), **counts, "warnings": said})
    total = sum(concerns.values())
    document = {
        "environment": dict(environment()),
        "models": len(rows),
        "findings": total,
        "nothing_to_do": concerns["observation"],
        "share_nothing_to_do": concerns["observation"] / max(1, total),
        "warnings": len(warnings),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print({name: value for name, value in document.items() if name not in ("rows", "environment")})
    if "--atlas" in sys.argv:
        PACKAGED.write_text(json.dumps(packaged_atlas(found).document(), indent=1) + "\n")


if __name__ == "__main__":
    main()
