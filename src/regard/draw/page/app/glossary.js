// What roles and measures mean, in plain words, for hovering, for keys and for screen readers.

const ROLE_WORDS = {
  induction: "Finds an earlier copy of the token and looks at what came after it: it continues what was seen before.",
  duplicate: "Looks at earlier copies of the same token.",
  retrieval: "Copies an answer out of a long text: it looks at the token of the answer that is to be said next.",
  previous: "Looks at the token just before.",
  next: "Looks at the token just after.",
  itself: "Looks at the token itself.",
  "same word": "Looks at the other pieces of a word that was cut into several tokens.",
  related: "Looks at words that are related in meaning.",
  punctuation: "Looks at punctuation.",
  nouns: "Looks at nouns, whatever the token is that looks.",
  names: "Looks at names of people, places and things.",
  verbs: "Looks at verbs.",
  auxiliaries: "Looks at auxiliary verbs, such as has and will.",
  pronouns: "Looks at pronouns, such as she and it.",
  determiners: "Looks at determiners, such as the and this.",
  prepositions: "Looks at prepositions, such as of and in.",
  adjectives: "Looks at adjectives.",
  adverbs: "Looks at adverbs.",
  numbers: "Looks at numbers.",
  coordinators: "Looks at coordinators, such as and and or.",
  subordinators: "Looks at words that open a subordinate clause, such as that and because.",
  conjuncts: "Links words that are joined by and, or, or a comma.",
  "relative clause": "Links a relative clause and the noun that it describes.",
  "parts of a compound": "Links the parts of a compound, such as bus and stop.",
  "parts of a name": "Links the parts of a name.",
  local: "Looks at its near surroundings: three tokens to each side.",
  "long-range": "Looks farther away than a head that looks at all tokens alike.",
  broad: "Looks at many tokens alike: it takes a mean of the text.",
  separator: "Rests on special tokens such as [SEP]. That is no content: weight is put where it does little.",
  first: "Rests on the first token, which then serves as a sink: weight is put where it does little.",
  sink: "Rests on one other token that most tokens look at: weight is put where it does little.",
  "resting only": "Rests, and does nothing else here: under 2 % of its weight is left beside the resting place.",
};

const MEASURE_WORDS = {
  entropy:
    "How far a query spreads its weights, in nats: 0 if one key has all, ln(number of keys) if all have the same.",
  peak: "The largest weight of a query: near 1 if it is sure of one key.",
  target: "The key that has the largest weight of a query.",
  max_logit: "The largest score of a query before the softmax.",
  distance: "How many tokens away a query looks, on average.",
  offset: "Where a query looks, on average: -1 is the token before, 0 itself, +1 the token after.",
  offsets: "The weight by relative position: so many tokens before or after the query.",
  previous: "The weight on the token before.",
  itself: "The weight on the token itself.",
  next: "The weight on the token after.",
  near: "The weight by relative position, for each query.",
  local: "The weight within a few tokens to each side, itself included.",
  on_first: "The weight on the first token of the text.",
  received: "How much weight a key gets from all queries.",
  induction: "The weight on what came after earlier copies of the token.",
  induction_apart: "The same without copies next to the token, and without the first token.",
  duplicate: "The weight on earlier copies of the token.",
  duplicate_apart: "The same without copies next to the token, and without the first token.",
  contribution: "How much a head adds to a token: weights times the lengths of what they carry.",
  contributed: "How much a token gives to others: weights times the length of what it carries.",
  divergence: "How different two heads are (Jensen-Shannon), in nats.",
  heatmap: "The map, made small.",
  links: "The strongest links of each query.",
  tokens: "The weight on a class of tokens.",
  tokens_first: "The part of it on the first token.",
  pairs: "The weight on given pairs of tokens.",
  pair_sets: "The weight on several sets of given pairs of tokens.",
};

// Columns that are no measures.
const COLUMN_WORDS = {
  layer: "The number of the layer, from 0, in the order in which layers are computed.",
  head: "The number of the head in its layer, from 0.",
  kind: "Self: a text looks at itself. Cross: one text looks at another.",
  role: "What the head does beside its resting place; empty if nothing is clear.",
  score: "How much the head does what its role says: as a rule the share of the weight beside the resting place.",
  also: "Other roles whose conditions the head meets.",
  rests:
    "The share of its weight that the head puts on its resting place: the first token, special tokens or another sink.",
  change: "How much of the weight moves from one run to the other: 0 if the maps are the same, 1 if nothing is left.",
  name: "The name of the module in the model.",
};

const NO_ROLE = "Nothing that the head does beside its resting place is clear enough in this text to have a name.";

const wordsIn = (words, name) => (Object.hasOwn(words, name) ? words[name] : null);

function roleWords(role) {
  const offset = /^offset ([+-])(\d+)$/.exec(role);
  if (offset) return `Looks at the token ${offset[2]} ${offset[1] === "-" ? "before" : "after"}.`;
  return wordsIn(ROLE_WORDS, role) || `Links words that belong together in syntax: ${short(role, 60)}.`;
}

function measureWords(name) {
  return wordsIn(MEASURE_WORDS, name) || wordsIn(COLUMN_WORDS, name) || "A measure of your own: a mean over queries.";
}

// One explanation at a time, beside what it explains. It stays while the pointer is over either, and Escape hides it.
class GlossaryTip {
  constructor() {
    this.node = element("div", { id: "tip", role: "tooltip", hidden: true });
    this.texts = element("div", { id: "glossary", hidden: true }); // for screen readers
    this.ids = new Map();
    document.body.append(this.node, this.texts);
    this.node.addEventListener("pointerenter", () => clearTimeout(this.timer));
    this.node.addEventListener("pointerleave", () => this.hide());
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
    document.addEventListener("pointerdown", ({ target }) => this.of && !this.of.contains(target) && this.hide());
    const main = document.getElementById("main");
    new MutationObserver(() => this.of && !this.of.isConnected && this.hide()).observe(main, {
      childList: true,
      subtree: true,
    });
  }

  // The id of an element that holds a text.
  idOf(text) {
    if (!this.ids.has(text)) {
      const id = `glossary-${this.ids.size}`;
      this.ids.set(text, id);
      this.texts.append(element("span", { id }, text));
    }
    return this.ids.get(text);
  }

  show(of, text) {
    clearTimeout(this.timer);
    this.of = of;
    this.node.textContent = text;
    this.node.hidden = false;
    const [box, own] = [of.getBoundingClientRect(), this.node.getBoundingClientRect()];
    const below = box.bottom + 6 + own.height <= window.innerHeight;
    const left = clamp(box.left, 8, Math.max(8, document.documentElement.clientWidth - own.width - 8));
    const top = below ? box.bottom + 6 : Math.max(4, box.top - own.height - 6);
    Object.assign(this.node.style, { left: `${left}px`, top: `${top}px` });
  }

  hide() {
    clearTimeout(this.timer);
    this.of = null;
    this.node.hidden = true;
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.hide(), 150);
  }
}

let glossaryTip = null;

// Explain an element that can have the focus: on hover, on focus and on a tap.
function explained(node, text) {
  glossaryTip = glossaryTip || new GlossaryTip();
  node.setAttribute("aria-describedby", glossaryTip.idOf(text));
  const show = () => glossaryTip.show(node, text);
  node.addEventListener("focus", show);
  node.addEventListener("click", () => node.isConnected && show());
  node.addEventListener("pointerenter", show);
  node.addEventListener("pointerleave", () => document.activeElement !== node && glossaryTip.later());
  node.addEventListener("blur", () => glossaryTip.hide());
  node.addEventListener("keydown", (event) => event.key === "Escape" && glossaryTip.hide());
  return node;
}

// A word with its explanation.
function explainedTerm(word, text, id) {
  return explained(element("button", { type: "button", class: "term", id }, word), text);
}

const roleTerm = (role, id) => explainedTerm(role, roleWords(role), id);
const measureTerm = (name, id) => explainedTerm(name, measureWords(name), id);
