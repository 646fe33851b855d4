// Table: every head with its role and measures; sorted by any column, filtered by words, saved as CSV.

class TableView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view table", "aria-label": "Table" });
  }

  row(layer, head) {
    const role = layer.role(head);
    const row = {
      layer: layer.index,
      name: layer.name,
      head,
      kind: layer.kind,
      role: role ? role.role : "",
      score: role ? role.score : null,
      also: role ? role.also.join(", ") : "",
      rests: layer.rests(head) ?? null,
    };
    for (const name of this.app.run.measures) row[name] = layer.measured(name, head) ?? null;
    return row;
  }

  rows() {
    const { run, state } = this.app;
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = run.heads().map(({ layer, head }) => this.row(layer, head));
    const kept = rows.filter((row) =>
      words.every((word) =>
        `${row.name} ${row.kind} ${row.role || "none"} ${row.also} ${row.layer}.${row.head}`
          .toLowerCase()
          .includes(word),
      ),
    );
    const sign = state.tdown ? -1 : 1;
    const key = state.tsort;
    return kept.sort((a, b) => {
      // Unknown values come last.
      if (a[key] === null || b[key] === null) return (a[key] === null) - (b[key] === null);
      return a[key] < b[key] ? -sign : a[key] > b[key] ? sign : a.layer - b.layer || a.head - b.head;
    });
  }

  show() {
    const { run } = this.app;
    const columns = ["layer", "head", "kind", "role", "score", "also", ...this.rests(), ...run.measures, "name"];
    const rows = this.rows();
    this.body = this.filled(columns, rows);
    this.count = element("p", { class: "note", role: "status" }, `${rows.length} heads`);
    if (
      this.table &&
      this.columns === columns.join() &&
      document.activeElement.id === "filter" &&
      this.node.contains(document.activeElement)
    ) {
      this.table.tBodies[0].replaceWith(this.body); // (the filter keeps the focus)
      this.node.querySelector(".note").replaceWith(this.count);
      return;
    }
    this.columns = columns.join();
    this.table = element("table", { class: "wide" }, element("thead", {}, this.header(columns)), this.body);
    fill(
      this.node,
      this.controls(columns),
      this.count,
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "heads" }, this.table),
    );
  }

  // The column of resting shares, where they are known.
  rests() {
    const { run } = this.app;
    return run.layers.some((layer) => layer.rest) && !run.measures.includes("rests") ? ["rests"] : [];
  }

  controls(columns) {
    const { state } = this.app;
    const filter = element("input", {
      type: "search",
      id: "filter",
      value: state.filter,
      placeholder: "role, layer, 2.5 …",
      oninput: (event) => state.set({ filter: event.target.value }),
    });
    return element(
      "div",
      { class: "controls" },
      field("Filter", filter),
      element("button", { type: "button", id: "csv", onclick: () => this.save(columns) }, "Save as CSV"),
    );
  }

  // The names of columns: they sort, and are explained.
  header(columns) {
    const { state } = this.app;
    const sorted = (name) => (state.tsort === name ? (state.tdown ? "descending" : "ascending") : "none");
    const sort = (name) => state.set(state.tsort === name ? { tdown: 1 - state.tdown } : { tsort: name, tdown: 0 });
    const top = columns.map((name) =>
      element(
        "th",
        { scope: "col", class: isNumberColumn(name) ? "number" : "", "aria-sort": sorted(name) },
        explained(
          element(
            "button",
            { type: "button", id: `sort-${name}`, onclick: () => sort(name) },
            name,
            element("span", { "aria-hidden": "true" }, state.tsort === name ? (state.tdown ? " ▾" : " ▴") : ""),
          ),
          COLUMN_WORDS[name] || measureWords(name),
        ),
      ),
    );
    return element("tr", {}, top);
  }

  filled(columns, rows) {
    const { run } = this.app;
    const all = run.heads().map(({ layer, head }) => this.row(layer, head));
    const measures = columns.filter((name) => isNumberColumn(name) && name !== "layer" && name !== "head");
    const shown = {};
    const ends = {};
    for (const name of measures) {
      const values = all.map((row) => row[name]).filter((value) => value !== null);
      shown[name] = evenDigits(values);
      ends[name] = name === "score" ? [0, 0] : [Math.min(...values), Math.max(...values)];
    }
    return element(
      "tbody",
      {},
      rows.map((row) =>
        element(
          "tr",
          {},
          columns.map((name) => (shown[name] ? measureCell(row[name], shown[name], ends[name]) : this.cell(row, name))),
        ),
      ),
    );
  }

  // A cell that is no measure.
  cell(row, name) {
    const value = row[name];
    if (name === "role") return element("td", {}, badge(value), ` ${value}`);
    if (name === "layer") return element("td", { class: "number", title: row.name }, String(value));
    if (name !== "head") return element("td", { title: value.length > 40 ? value : null }, value);
    const link = this.app.state.link({ view: "head", layer: row.layer, head: row.head, zoom: "", q: -1, k: -1 });
    const attributes = { "aria-label": `layer ${row.layer} head ${value}`, ...link };
    return element("td", { class: "number" }, element("a", attributes, String(value)));
  }

  save(columns) {
    const quoted = (value) => {
      // A spreadsheet would run a cell that begins like a formula, whatever blanks stand before it. Some split cells at
      // a semicolon or a tab.
      const formula =
        typeof value === "string" && /^[\s\0-\x1f\x7f]*[=+\-@\uff1d\uff0b\uff0d\uff20]|^[\t\r\n]/.test(value);
      const text = value === null ? "" : formula ? `'${value}` : String(value);
      return /[",;\t\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
    };
    const lines = [columns, ...this.rows().map((row) => columns.map((name) => row[name]))].map((row) =>
      row.map(quoted).join(","),
    );
    download("heads.csv", new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" }));
  }
}

const isNumberColumn = (column) => !["name", "kind", "role", "also"].includes(column);

// A number with a bar behind it, as long as its place between the ends of its column.
function measureCell(value, shown, [low, high]) {
  if (value === null) return element("td", { class: "number" });
  const node = element("td", { class: "number" }, shown(value));
  if (high > low) node.style.setProperty("--share", `${(100 * (value - low)) / (high - low)}%`);
  return node;
}

// A small table; its last columns are numbers. Where the first column has no name, it names the rows.
function plainTable(caption, columns, rows, { numbers = 0, ...attributes } = {}) {
  const kind = (i) => (i >= columns.length - numbers ? { class: "number" } : {});
  const cell = (content, i) =>
    i || columns[0] ? element("td", kind(i), content) : element("th", { scope: "row" }, content);
  const top = columns.map((name, i) => element("th", { scope: "col", ...kind(i) }, name));
  const body = rows.map((row) => element("tr", {}, row.map(cell)));
  return element(
    "table",
    { class: "plain", ...attributes },
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, top)),
    element("tbody", {}, body),
  );
}

// A function that writes the numbers of a column with the same number of decimals.
function evenDigits(values) {
  const most = values.reduce((a, b) => (Math.abs(b) > a ? Math.abs(b) : a), 0);
  if (most > 0 && most < 1e-3) return (x) => (Number.isFinite(x) ? x.toExponential(2) : "–");
  const digits = most > 0 ? clamp(3 - Math.floor(Math.log10(most)), 0, 3) : 0;
  return (x) => (Number.isFinite(x) ? x.toFixed(digits) : "–");
}
