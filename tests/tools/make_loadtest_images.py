"""The pictures of docs/loadtest.md: `python -m tests.tools.make_loadtest_images reports/<time>`; needs a Chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH = 1080
PARTS = {  # picture: first heading, heading behind the last, height in pixels
    "loadtest-answer.png": ("<body>", "<h2>Stages</h2>", 1210),
    "loadtest-timeline.png": ("<h2>Over time</h2>", "<h2>Errors</h2>", 1700),
}


def main(directory: Path) -> int:
    """Take them; 3 when there is no browser."""
    browser = next((found for name in ("chromium", "google-chrome", "chrome") if (found := shutil.which(name))), None)
    if browser is None:
        print("no Chromium here; on Debian: apt-get install chromium", file=sys.stderr)
        return 3
    page = (directory / "report.html").read_text(encoding="utf-8")
    head = page[: page.index("<body>")]
    for name, (first, last, height) in PARTS.items():
        body = page[page.index(first) : page.index(last)].removeprefix("<body>")
        with tempfile.TemporaryDirectory() as folder:
            part = Path(folder) / "part.html"
            part.write_text(f"{head}<body>{body}</body></html>", encoding="utf-8")
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
            size = f"--window-size={WIDTH},{height}"
            shot = f"--screenshot={IMAGES / name}"
            subprocess.run([browser, *options, size, shot, part.as_uri()], check=True, capture_output=True, timeout=120)
        print(IMAGES / name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
