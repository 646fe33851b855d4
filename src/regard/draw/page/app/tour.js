// The guided tour: ten short steps that drive the page. `state.tour` is the step; negative where the tour was left.

class Tour {
  constructor(app) {
    this.app = app;
    this.node = element("aside", { class: "tour", "aria-label": "guided tour", hidden: true });
    this.entered = 0; // the step that is shown
    this.start = {}; // the state when it was entered
    app.main.after(this.node);
  }

  get step() {
    return clamp(this.app.state.tour, 0, TOUR.length);
  }

  startButton(id) {
    const left = -this.app.state.tour;
    const resumes = left > 0 && left <= TOUR.length;
    return element(
      "button",
      { type: "button", class: "start-tour", id, onclick: () => this.go(resumes ? left : 1) },
      resumes ? `Resume the tour (step ${left} of ${TOUR.length})` : `Take the tour: attention in ${TOUR.length} steps`,
    );
  }

  // Enter a step: the page turns to what it is about.
  go(number) {
    const step = clamp(number, 1, TOUR.length);
    this.app.state.set({ ...TOUR[step - 1].show(this.app), tour: step }, true);
    this.node.querySelector("h2").focus();
    const { at } = TOUR[step - 1];
    const seen = () => {
      const node = at && document.querySelector(at);
      if (node && this.step === step) node.scrollIntoView({ block: "start" });
    };
    setTimeout(seen, 250); // (when the view is drawn)
  }

  leave() {
    this.app.state.set({ tour: -this.step }, true);
    document.getElementById("tour").focus();
  }

  toggle() {
    if (this.step) this.leave();
    else this.go(Math.max(-this.app.state.tour, 1));
  }

  // After every change of the state.
  update() {
    const { app, step } = this;
    this.node.hidden = !step || !app.data;
    if (this.node.hidden) {
      this.entered = 0;
      return;
    }
    if (this.entered !== step) {
      this.entered = step;
      this.start = { ...app.state };
      this.draw();
    }
    const done = TOUR[step - 1].done(app.state, this.start, app);
    this.task.classList.toggle("done", done);
    this.note.textContent = done ? "Done." : "";
  }

  draw() {
    const { step } = this;
    const { title, text, task } = TOUR[step - 1];
    const button = (id, name, act, disabled = false) =>
      element("button", { type: "button", id, onclick: act, disabled }, name);
    this.task = element("p", { class: "do", id: "tour-task" }, task(this.app));
    this.note = element("span", { role: "status", class: "unseen", id: "tour-done" });
    fill(
      this.node,
      element(
        "div",
        {},
        element("h2", { tabindex: -1 }, `${step} of ${TOUR.length}: ${title}`),
        element("p", { id: "tour-text" }, text(this.app)),
        this.task,
        this.note,
      ),
      element(
        "div",
        { class: "steps" },
        button("tour-back", "Back", () => this.go(step - 1), step === 1),
        button("tour-next", step === TOUR.length ? "End" : "Next", () =>
          step === TOUR.length
            ? this.app.state.set({ tour: 0, view: "story", role: "", aside: 0 }, true)
            : this.go(step + 1),
        ),
        button("tour-leave", "Leave", () => this.leave()),
      ),
    );
  }
}

const token = (text, i) => element("b", { class: "token" }, isolated(short(text.tokens[i], 18)));

// The head that a tour is about, its strongest link beside its resting place, and the place in the page's state.
function tourHead(app) {
  const [index, head] = app.run.best;
  const card = app.run.story && app.run.story.cards[0];
  const link = card && card.links[0];
  return {
    layer: app.run.layers[index],
    head,
    query: link ? link[0] : clamp(1, 0, app.run.layers[index].n - 1),
    key: link ? link[2] : 0,
    weight: link ? link[4] : null,
  };
}

const atHead = (app, view, more = {}) => {
  const { layer, head } = tourHead(app);
  return { view, layer: layer.index, head, zoom: "", q: -1, k: -1, aside: 0, ...more };
};
const sizes = (app) => {
  const { layer } = tourHead(app);
  const { flow } = layer;
  return { layer, heads: layer.heads, d: flow ? flow.head_dim : null, width: flow ? flow.width : null };
};
const isCausal = (app) => app.run.causal;

const TOUR = [
  {
    title: "What a head is",
    at: "#readout",
    show: (app) => atHead(app, "head"),
    text: (app) => {
      const { layer, head, query, key, weight } = tourHead(app);
      const here = weight
        ? [
            " Here ",
            token(layer.queries, query),
            " gives ",
            `${number(weight, 2)} of its attention to `,
            token(layer.keys, key),
            ".",
          ]
        : [];
      return [
        `This model has ${app.run.layers.length} layers, each with ${layer.heads} heads. A head is a reader with one habit: `,
        "for every token it decides how much to look at every other one. The map shows it: each row is a token that looks, ",
        `each column one that is looked at, and a row adds up to 1. This is head ${head} of layer ${layer.index}.`,
        here,
      ];
    },
    task: () => "Do: choose a strong cell of the map, and read who looks at whom above it.",
    done: (state) => state.q >= 0,
  },
  {
    title: "Query, key and value",
    show: (app) => atHead(app, "flow", { q: tourHead(app).query }),
    text: (app) => {
      const { d, width } = sizes(app);
      const made =
        width && d
          ? `Its ${width} numbers are multiplied with three learned matrices, and give three short vectors of ${d} numbers for each head`
          : "Three learned matrices make three short vectors of it for each head";
      return [
        `A token comes into the layer as a vector. ${made}: the query (what it looks for), `,
        "the key (what it can be found by) and the value (what it hands on). ",
        "Queries meet keys to decide who is looked at; values are what is carried away.",
      ];
    },
    task: () => "Do: choose another token above, and see that its query is another one.",
    done: (state, start) => state.q !== start.q,
  },
  {
    title: "Scores: how well a query fits a key",
    at: ".flow .stage:nth-of-type(2)",
    show: (app) => atHead(app, "flow", { q: tourHead(app).query, steps: 1 }),
    text: (app) => {
      const { d } = sizes(app);
      return [
        "The query of this token is multiplied with the key of every token, element by element, and the products are added up: ",
        "one number for each key, large where both point the same way. It is divided by the root of the head's width",
        d ? ` (√${d} = ${number(Math.sqrt(d), 3)})` : "",
        ", so that scores do not grow with it.",
      ];
    },
    task: () => "Do: choose another key in the row of this head, and see its product element by element.",
    done: (state, start) => state.k !== start.k,
  },
  {
    title: "The mask: who may be seen",
    at: "#top",
    show: (app) =>
      atHead(app, "flow", { q: isCausal(app) ? Math.min(2, tourHead(app).layer.n - 1) : tourHead(app).query }),
    text: (app) =>
      isCausal(app)
        ? [
            "This model predicts the next token, so a token must not see those after it. Their scores are set to −∞ before the softmax: ",
            "they are crossed out, and their weights are exactly 0. The first token sees only itself.",
          ]
        : [
            "This model reads the whole text at once: every token may see every other, so nothing is crossed out here. ",
            "A model that predicts the next token would hide those that come after; padding is always hidden. ",
            "A hidden score is set to −∞, and its weight is exactly 0.",
          ],
    task: () => "Do: choose the first token, and count the keys that it may see.",
    done: (state) => state.q === 0,
  },
  {
    title: "Softmax: scores become shares",
    at: "#threshold",
    show: (app) => atHead(app, "head"),
    text: (app) => {
      const { layer, head } = tourHead(app);
      const rests = layer.rests(head);
      return [
        "e is raised to the power of each score, and divided by the sum of its row: now all are positive, and add up to 1. ",
        "A head that finds nothing must still put its 1 somewhere: most put it on one place, the resting place",
        rests ? ` (this head: ${(100 * rests).toFixed(0)}% of its attention).` : ".",
      ];
    },
    task: () => "Do: switch on “set the resting place aside”, and see what this head does with the rest.",
    done: (state) => state.aside === 1,
  },
  {
    title: "Many heads",
    show: () => ({ view: "model", role: "", by: "", aside: 0 }),
    text: (app) => {
      const { heads, d, width } = sizes(app);
      const split =
        d && width
          ? `: ${heads} heads of ${d} numbers beside a width of ${width}, so many heads cost no more than one large one`
          : "";
      const { flow } = sizes(app).layer;
      const groups = flow && flow.kv_heads < heads ? heads / flow.kv_heads : 1;
      const shared = groups > 1 ? ` (here ${groups} heads share each set of keys and values)` : ", keys and values";
      return [
        `All heads of a layer work at the same time on the same tokens, each with its own queries${shared}`,
        split,
        ". Here are all of them; the colour says what a head does beside its resting place, the bar how much it rests.",
      ];
    },
    task: () => "Do: choose a role in the list “Role”, and see which heads have it, and in which layers.",
    done: (state) => state.role !== "",
  },
  {
    title: "Back together: concatenation and output projection",
    at: "#cancel",
    show: (app) => atHead(app, "flow", { q: tourHead(app).query }),
    text: (app) => {
      const { heads, d, width, layer } = sizes(app);
      const biased = layer.flow && layer.flow.bias;
      return [
        "Each head adds up the values it looked at, weighted. ",
        d
          ? `The ${heads} results of ${d} numbers are laid side by side (${heads * d} numbers) `
          : "The results are laid side by side ",
        width
          ? `and multiplied with one more matrix, W_o, back to ${width} numbers. `
          : "and multiplied with one more matrix, W_o. ",
        `So the result is a sum: what each head adds${biased ? ", and a bias" : ""}. It is added to the token's vector; a norm and a feed-forward part follow, then the next layer.`,
      ];
    },
    task: () => "Do: choose another token, and see whether another head adds the most to it.",
    done: (state, start) => state.q !== start.q,
  },
  {
    title: "What heads learn",
    show: () => ({ view: "story", role: "" }),
    text: (app) => [
      "Nobody told the heads what to do: training did. Some attend to the token before, some find the noun of an article or the subject of a verb, ",
      "some what came after an earlier copy. Each card is one kind that this text shows, with its evidence",
      app.run.story && app.run.story.absent.length ? "; what no head shows is listed below." : ".",
    ],
    task: () => "Do: open the map of one of the cards.",
    done: (state) => state.view === "head",
  },
  {
    title: "Why many heads",
    show: (app) => ({ view: "words", word: tourHead(app).key }),
    text: () => [
      "A softmax has one budget: what a head gives to the subject of a verb it cannot give to its object. ",
      "With many heads a token can ask many questions at once. Here is one word, and what every head of every layer does with it.",
    ],
    task: () => "Do: choose another word.",
    done: (state, start) => state.word !== start.word,
  },
  {
    title: "What if one fails",
    show: (app) => {
      const worst = strongestEffect(app.run);
      return worst ? { view: "head", layer: worst.layer, head: worst.head, aside: 0 } : { view: "story" };
    },
    text: (app) => {
      const worst = strongestEffect(app.run);
      const { kind } = app.run.effects || {};
      const found = worst
        ? [
            `Of the heads in the story, ${worst.layer}.${worst.head} matters most: without it ${changeText(kind, worst.change)}. `,
          ]
        : ["A head can be switched off with regard.ablate, and the model be run again. "];
      return [
        found,
        "A single head can often be missed: other heads do nearly the same, and the token's vector passes by all of them. Which ones a model cannot do without is a question to be measured, not guessed.",
      ];
    },
    task: () =>
      "Do: go to another head (] or [), or back to the story, where the heads are listed by what changes without them.",
    done: (state, start) => state.head !== start.head || state.layer !== start.layer || state.view !== start.view,
  },
];

// The head of the story without which most changes.
function strongestEffect(run) {
  if (!run.effects) return null;
  const found = Object.entries(run.effects.heads).sort((a, b) => b[1].change - a[1].change)[0];
  if (!found) return null;
  const [layer, head] = found[0].split(".").map(Number);
  return { layer, head, change: found[1].change };
}
