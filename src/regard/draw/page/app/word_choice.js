// The words of a text, to choose one from: all of a short text, of a long one a part and a search.

const WORDS_SHOWN = 120; // words in sight, at most
const WORDS_FOUND = 24; // words that a search finds, at most

class WordChoice {
  // view: has `text`, its words (`units`), the number of the chosen one (`at`), and `choose(number)`.
  constructor(view) {
    this.view = view;
    this.found = element("div", { class: "found" });
    this.sought = "";
  }

  // The text as words to choose from; of a long text a part, and a search.
  show() {
    const count = this.view.units.length;
    const first = clamp(this.view.at - WORDS_SHOWN / 2, 0, Math.max(0, count - WORDS_SHOWN));
    const words = this.view.units.slice(first, first + WORDS_SHOWN).map((unit, i) => this.word(unit, first + i));
    const list = element(
      "div",
      {
        class: "sentence",
        role: "radiogroup",
        "aria-label": "word",
        onkeydown: (event) => this.key(event),
      },
      words,
    );
    if (count <= WORDS_SHOWN) return list;
    const search = element("input", {
      type: "search",
      id: "find-word",
      value: this.sought,
      oninput: (event) => this.search(event.target.value),
    });
    const part = `words ${first}–${first + words.length - 1} of ${count}, around the chosen one`;
    this.search(this.sought);
    return element(
      "div",
      {},
      element("div", { class: "controls" }, field("Find", search), element("small", {}, part)),
      this.found,
      list,
    );
  }

  word([first, last, label], at) {
    const chosen = at === this.view.at;
    return element(
      "button",
      {
        type: "button",
        role: "radio",
        id: `word-${first}`,
        "aria-checked": String(chosen),
        tabindex: chosen ? 0 : -1,
        class: this.view.text.special.has(first) ? "special" : "",
        title: short(`${first}${last - first > 1 ? `–${last - 1}` : ""} ${label}`, 200),
        dir: "auto",
        onclick: () => this.view.choose(at),
      },
      short(label, 24),
    );
  }

  key(event) {
    const last = this.view.units.length - 1;
    const to = {
      ArrowLeft: this.view.at - 1,
      ArrowUp: this.view.at - 1,
      ArrowRight: this.view.at + 1,
      ArrowDown: this.view.at + 1,
      Home: 0,
      End: last,
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(to, event.key)) return;
    event.preventDefault();
    event.stopPropagation();
    this.view.choose(clamp(to[event.key], 0, last), true);
  }

  // The words that hold some letters, as buttons.
  search(letters) {
    this.sought = letters;
    const wanted = letters.trim().toLowerCase();
    const found = [];
    if (wanted)
      for (let i = 0; i < this.view.units.length && found.length <= WORDS_FOUND; i++)
        if (this.view.units[i][2].toLowerCase().includes(wanted)) found.push(i);
    const button = (at) =>
      element(
        "button",
        { type: "button", class: "crop", id: `found-${at}`, dir: "auto", onclick: () => this.view.choose(at) },
        `${this.view.units[at][0]} ${isolated(short(this.view.units[at][2], 20))}`,
      );
    const more = found.length > WORDS_FOUND ? element("small", {}, "and more: write on") : null;
    const none = wanted && !found.length ? element("small", {}, "no such word") : null;
    fill(this.found, found.slice(0, WORDS_FOUND).map(button), more, none);
  }
}

// The number of a long word of one token among the first, to begin with: as a rule it has content.
function longestWord(units, text) {
  const length = ([first, last, label]) =>
    text.special.has(first) || label.length > 20 ? 0 : label.length / (last - first);
  return units.slice(0, WORDS_SHOWN).reduce((best, unit, i) => (length(unit) > length(units[best]) ? i : best), 0);
}
