// Story: the heads worth seeing in this text, each in a sentence.

class StoryView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view story", "aria-label": "Story" });
  }

  show() {
    fill(this.node, element("p", { class: "note" }, "No story."));
  }
}
