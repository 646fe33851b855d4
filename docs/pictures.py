"""Take the pictures of the page in docs/images: each view on a desktop, on a phone, and in dark.

python docs/pictures.py            needs the weights of minilm, playwright and chromium
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import regard

TEXT = "The cat that I saw yesterday ran away"
HERE = Path(__file__).parent
VIEWS = ("story", "model", "head", "words", "flow", "table", "compare")
SCREENS = {
    "": {"viewport": {"width": 1280, "height": 900}},
    "-dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "-phone": {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2},
}
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]


def main() -> None:
    model = regard.models.load("minilm")
    treebank = HERE.parent / "examples" / "sentences.conllu"
    seen = regard.look(model, text=TEXT, show=False, treebank=treebank)
    with regard.ablate(model, {0: [2]}):
        without = regard.look(model, text=TEXT, show=False, treebank=treebank)
    regard.draw.figure(seen, path=HERE / "images" / "figure.png")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        one, two = Path(folder) / "one.html", Path(folder) / "two.html"
        regard.draw.page(seen, path=one)
        regard.draw.page({"intact": seen, "without 0.2": without}, path=two)
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for suffix, options in SCREENS.items():
            tab = browser.new_page(**options)
            for view in VIEWS:
                tab.goto(f"{(two if view == 'compare' else one).as_uri()}#view={view}")
                tab.reload()  # (another address of the same file is no new page)
                tab.wait_for_selector("main[aria-busy=false]", state="attached")
                tab.wait_for_timeout(300)
                tab.screenshot(path=HERE / "images" / f"{view}{suffix}.png")
            tab.goto(f"{one.as_uri()}#view=head&tour=1")
            tab.reload()
            tab.wait_for_selector(".tour h2", state="attached")
            tab.screenshot(path=HERE / "images" / f"tour{suffix}.png")
        browser.close()


if __name__ == "__main__":
    main()
