// Words: what every head does with one word, in both directions.

class WordsView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view words", "aria-label": "Words" });
  }

  show() {
    fill(this.node, element("p", { class: "note" }, "No word."));
  }
}
