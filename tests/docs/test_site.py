"""The documentation site builds without warnings, and its API page has every public name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import yaml

import megatron01

ROOT = Path(__file__).resolve().parents[2]


def test_the_site_builds_with_all_public_names(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    page = (tmp_path / "site" / "api" / "index.html").read_text()
    for name in megatron01.__all__:
        assert re.search(rf'id="megatron01(\.[a-z_]+)*\.{name}"', page), f"{name} is not on the API page"


def test_every_page_is_in_the_navigation():
    navigation = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"\b([a-z_]+\.md)\b", yaml.safe_dump(navigation)))
    assert listed == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_importing_the_package_does_not_import_torch():
    program = "import sys, megatron01; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_public_name_can_be_imported():
    assert len(megatron01.__all__) == len(set(megatron01.__all__))
    for name in megatron01.__all__:
        assert getattr(megatron01, name).__name__ == name
