"""Every page: what the policy allows, and names that stay text."""

import base64
import hashlib
import re

import pytest

from kappascope.clinic.diagnosis import Diagnosis
from kappascope.pages.rendering import legible


def test_the_policy_names_the_hashes_of_style_and_script() -> None:
    html = Diagnosis("toy.pt").html()
    for tag in ("style", "script"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src &#39;sha256-{digest}&#39;" in html
    assert "default-src &#39;none&#39;" in html


@pytest.mark.parametrize("name", ["<hr>", "a\u202eb", "\ud800", "\x1b[31m", "{{ 7 * 7 }}"])
def test_no_name_is_markup_or_hides_anything(name: str) -> None:
    html = Diagnosis(name, notes=(name,)).html()
    html.encode()
    assert name not in html or name.startswith("{{")
    assert "<p>49" not in html and all(c.isprintable() or c.isspace() for c in html)


def test_plain_text_is_left_as_it_is() -> None:
    for text in ("", "layers.0.weight", "κ × σ₁", "two\nlines", "non\xa0breaking"):
        assert legible(text) == text
