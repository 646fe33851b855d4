// Story: the heads worth seeing in this text, each in a sentence, with arcs over the words.

// Roles that say only where a head rests, or that it attends to everything.
const UNINFORMATIVE = new Set(["broad", "separator", "first", "sink", "resting only"]);
const ARC_WORDS = 26; // words that a picture of arcs shows, at most

class StoryView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view story", "aria-label": "Story" });
  }

  show() {
    const { app } = this;
    const { story } = app.run;
    if (!story) {
      fill(this.node, element("p", { class: "note" }, "There is no story for this run."));
      return;
    }
    fill(
      this.node,
      this.begin(),
      story.cards.length
        ? element(
            "div",
            { class: "cards" },
            story.cards.map((card) => this.card(card)),
          )
        : element("p", { class: "note" }, "No head of this text has a role: there is nothing to tell of it."),
      story.absent.length ? this.absent(story.absent) : null,
      this.words(),
      effectsOf(app.run) ? this.said() : null,
    );
  }

  begin() {
    const { app } = this;
    const { run } = app;
    const heads = run.heads().length;
    const known = run
      .heads()
      .filter(({ layer, head }) => layer.role(head) && !UNINFORMATIVE.has(layer.role(head).role));
    const tokens = run.layers[0].n;
    const resting = run.heads().filter(({ layer, head }) => layer.rests(head) > 0.5).length;
    const part = (number, what) => [element("b", {}, number.toLocaleString("en")), what];
    return element(
      "div",
      { class: "begin" },
      element(
        "p",
        {},
        part(heads, ` heads in ${run.layers.length} layers read `),
        part(tokens, ` tokens. `),
        `${known.length} of them do more than rest or attend to everything; ${resting} rest with more than half of their attention. `,
        "These are the ones worth seeing in this text, the clearest of each kind.",
      ),
      app.tour ? app.tour.startButton("story-tour") : null,
    );
  }

  card(card) {
    const { state } = this.app;
    const layer = this.app.run.layers[card.layer];
    const name = `${card.layer}.${card.head}`;
    const to = { layer: card.layer, head: card.head, zoom: "", q: -1, k: -1 };
    const first = card.links[0];
    const flow = first ? { ...to, q: first[0] } : to;
    const usual = layer.role(card.head) && layer.role(card.head).origin === "atlas" ? layer.role(card.head) : null;
    const effect = effectLine(this.app, card.layer, card.head);
    const way = (text, label, changes, id = null) =>
      element("a", { ...state.link(changes), id, "aria-label": label }, text);
    const node = element(
      "article",
      { class: "card", id: `card-${name}`, "data-kind": card.kind, "aria-label": `head ${name}, ${card.role}` },
      element(
        "h3",
        {},
        badge(card.role),
        element("a", { ...state.link({ ...to, view: "head" }), id: `card-title-${name}` }, `${name} ${card.role}`),
        usual && usual.role !== card.role ? element("small", {}, `in other texts mostly: ${usual.role}`) : null,
      ),
      element("p", { class: "told" }, sentenceParts(card.sentence)),
      card.links.length ? this.arcs(layer, card) : null,
      effect ? element("p", { class: "effect" }, effect) : null,
      element(
        "p",
        { class: "onward" },
        way("See its map", `see the map of ${name}`, { ...to, view: "head" }, `see-${name}`),
        layer.flow ? way("Follow its numbers", `follow the numbers of ${name}`, { ...flow, view: "flow" }) : null,
      ),
    );
    node.style.setProperty("--role", roleColour(card.role));
    return node;
  }

  // The words, with an arc from each query to its key, as thick as the weight.
  arcs(layer, card) {
    const groups = arcUnits(layer, card.links);
    const [size, gap, high] = [14, 12, 74];
    let x = 4;
    const places = groups.map(([, , label]) => {
      const width = textWidth(label, size);
      const place = [x, width];
      x += width + gap;
      return place;
    });
    const middle = (at) => places[at][0] + places[at][1] / 2;
    const unitOf = (token) => groups.findIndex(([first, last]) => first <= token && token < last);
    const links = card.links
      .map(([q, , k, , weight]) => [unitOf(q), unitOf(k), weight])
      .filter(([a, b]) => a >= 0 && b >= 0);
    const linked = new Set(links.flatMap(([a, b]) => [a, b]));
    const paths = links.map(([a, b, weight]) => arcPath(middle(a), middle(b), high, weight));
    const words = groups.map(([, , label], at) =>
      shape(
        "text",
        {
          x: middle(at),
          y: high + 18,
          "text-anchor": "middle",
          "font-size": size,
          "font-weight": linked.has(at) ? 700 : 400,
          fill: "currentColor",
          direction: "ltr",
        },
        isolated(label),
      ),
    );
    const said = links.map(([a, b, weight]) => `${groups[a][2]} looks at ${groups[b][2]}, ${weight.toFixed(2)}`);
    const picture = shape(
      "svg",
      { class: "arcs", width: x, height: high + 26, viewBox: `0 0 ${x} ${high + 26}`, role: "img" },
      shape("title", {}, said.join("; ")),
      paths,
      words,
    );
    return element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": said.join("; ") }, picture);
  }

  absent(lines) {
    return element(
      "section",
      { class: "absent" },
      element("h3", {}, "What is not there"),
      element(
        "ul",
        {},
        lines.map((line) => element("li", {}, isolated(line))),
      ),
    );
  }

  // The words that cards use.
  words() {
    const terms = [
      [
        "rests",
        "Most heads put much of their attention on one place (the first token, a special token) when they find nothing: a row must add up to 1. That is set aside, and what a head does with the rest is told.",
      ],
      [
        "uniform attention",
        "the share that the same keys would get if a head attended to all keys alike: what chance gives.",
      ],
      [
        "right in a treebank",
        "over many sentences whose grammar was marked by people, how often the word that the head attends to most is the right one.",
      ],
      [
        "the best fixed offset",
        "how often always taking the word at one fixed distance (such as the next word) would be right: what a head without grammar reaches.",
      ],
      ["shuffled weights", "the same for the best head of this model after its weights were shuffled."],
      [
        "in other texts mostly",
        "what an atlas of this model, made from that treebank, says of the head; a text shows only some of it.",
      ],
      [
        "nats",
        "how far the probabilities of all next tokens move (Kullback-Leibler divergence); 0 is no change, 0.7 about a halving of what was likely.",
      ],
    ];
    return element(
      "details",
      { class: "how" },
      element("summary", {}, "How to read these sentences"),
      element(
        "dl",
        {},
        terms.flatMap(([term, text]) => [element("dt", {}, term), element("dd", {}, text)]),
      ),
    );
  }

  // What the model says, with all heads and without each head of the story.
  said() {
    const { app } = this;
    const { kind, heads } = effectsOf(app.run);
    const rows = Object.keys(heads)
      .sort((a, b) => heads[b].change - heads[a].change)
      .map((name) => {
        const [layer, head] = name.split(".").map(Number);
        return element(
          "tr",
          {},
          element(
            "th",
            { scope: "row" },
            element("a", app.state.link({ view: "head", layer, head }), `without ${name}`),
          ),
          element("td", { "data-change": heads[name].change }, changeText(kind, heads[name].change)),
          kind === "next" ? element("td", {}, nextTokens(heads[name].top, 3)) : null,
        );
      });
    return element(
      "section",
      { class: "said" },
      element("h3", {}, kind === "next" ? "The next token" : "The vector of the sentence"),
      kind === "next"
        ? element("p", {}, "With all heads: ", nextTokens(effectsOf(app.run).intact.top, 5))
        : element("p", {}, "How far the mean of the last hidden states turns when a head is switched off."),
      element("table", { class: "plain", id: "effects" }, element("tbody", {}, rows)),
    );
  }
}

// Parts of a sentence: words, and tokens of the text as [side, first, last, name].
function sentenceParts(parts) {
  return parts.map((part) =>
    typeof part === "string" ? part : element("b", { class: "token" }, isolated(short(part[3], 32))),
  );
}

// The words around some links, as [first, last, label]; all of them in a short text.
function arcUnits(layer, links) {
  const tokenWise = links.some(([q0, q1, k0, k1]) => layer.queries.word[q0] === layer.queries.word[k0]);
  const groups = layer.queries.groups(!tokenWise, true).map(([first, last, label]) => [first, last, short(label, 18)]);
  if (groups.length <= ARC_WORDS) return groups;
  const at = (token) => groups.findIndex(([first, last]) => first <= token && token < last);
  const [a, b] = [at(links[0][0]), at(links[0][2])].sort((x, y) => x - y);
  const from = clamp(Math.floor((a + b - ARC_WORDS) / 2), 0, groups.length - ARC_WORDS);
  if (b - a < ARC_WORDS) return groups.slice(from, from + ARC_WORDS);
  const half = ARC_WORDS >> 1; // both ends, with a gap between them
  const near = (place) => groups.slice(clamp(place - (half >> 1), 0, groups.length), place + (half >> 1));
  return [...near(a), [-1, -1, "…"], ...near(b)];
}

// An arc over the words from x to y, with an arrow at the key.
function arcPath(x, y, base, weight) {
  const top = Math.max(8, base - 18 - 0.32 * Math.abs(x - y));
  const stroke = Math.max(1, 5 * weight).toFixed(2);
  const curve =
    x === y
      ? `M${x - 7} ${base}C${x - 16} ${base - 34} ${x + 16} ${base - 34} ${x + 7} ${base}`
      : `M${x} ${base}C${x} ${top} ${y} ${top} ${y} ${base - 6}`;
  const end = x === y ? x + 7 : y;
  return shape(
    "g",
    { class: "arc" },
    shape("path", { d: curve, fill: "none", stroke: "var(--line)", "stroke-width": stroke, "stroke-opacity": 0.8 }),
    shape("path", { d: `M${end - 4} ${base - 8}L${end + 4} ${base - 8}L${end} ${base}Z`, fill: "var(--line)" }),
    shape(
      "text",
      {
        x: (x + y) / 2,
        y: x === y ? base - 30 : 0.25 * base + 0.75 * top - 4,
        "text-anchor": "middle",
        "font-size": 11,
        fill: "currentColor",
      },
      weight.toFixed(2),
    ),
  );
}

const textRuler = document.createElement("canvas").getContext("2d");
function textWidth(text, size) {
  textRuler.font = `700 ${size}px system-ui, sans-serif`;
  return Math.max(textRuler.measureText(text).width, 8);
}
