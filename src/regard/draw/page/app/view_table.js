// Table: every head with its role and measures; sorted by any column, filtered by words, saved as CSV.

class TableView {
  constructor(app) {
    this.app = app;
    this.node = element("section", { class: "view table", "aria-label": "Table" });
  }

  rows() {
    const { run, state } = this.app;
    const words = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = run.heads().map(({ layer, head }) => {
      const role = layer.role(head);
      const row = {
        layer: layer.index,
        name: layer.name,
        head,
        kind: layer.kind,
        role: role ? role.role : "",
        score: role ? role.score : null,
        also: role ? role.also.join(", ") : "",
      };
      for (const name of run.measures) row[name] = layer.measured(name, head) ?? null;
      return row;
    });
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
    const { state, run } = this.app;
    const columns = ["layer", "head", "name", "kind", "role", "score", "also", ...run.measures];
    const numeric = (name) => !["name", "kind", "role", "also"].includes(name);
    const rows = this.rows();
    const sorted = (name) => (state.tsort === name ? (state.tdown ? "descending" : "ascending") : "none");
    const sort = (name) => state.set(state.tsort === name ? { tdown: 1 - state.tdown } : { tsort: name, tdown: 0 });
    const top = columns.map((name) =>
      element(
        "th",
        { scope: "col", class: numeric(name) ? "number" : "", "aria-sort": sorted(name) },
        element(
          "button",
          { type: "button", id: `sort-${name}`, onclick: () => sort(name) },
          name,
          element("span", { "aria-hidden": "true" }, state.tsort === name ? (state.tdown ? " ▾" : " ▴") : ""),
        ),
      ),
    );
    const ends = Object.fromEntries(
      run.measures.map((name) => {
        const values = run.all(name);
        return [name, [Math.min(...values), Math.max(...values)]];
      }),
    );
    const cell = (row, name) => {
      const value = row[name];
      if (name === "role") return element("td", {}, badge(value), ` ${value}`);
      const kind = { class: numeric(name) ? "number" : "" };
      if (name === "head")
        return element(
          "td",
          kind,
          element(
            "a",
            {
              "aria-label": `layer ${row.layer} head ${value}`,
              ...state.link({ view: "head", layer: row.layer, head: row.head, zoom: "", q: -1, k: -1 }),
            },
            String(value),
          ),
        );
      if (typeof value !== "number")
        return element(
          "td",
          { ...kind, title: value && value.length > 40 ? value : null },
          value === null ? "" : value,
        );
      const node = element("td", kind, number(value));
      if (ends[name] && ends[name][1] > ends[name][0])
        node.style.setProperty("--share", `${(100 * (value - ends[name][0])) / (ends[name][1] - ends[name][0])}%`);
      return node;
    };
    const filter = element("input", {
      type: "search",
      id: "filter",
      value: state.filter,
      placeholder: "role, layer, 2.5 …",
      oninput: (event) => state.set({ filter: event.target.value }),
    });
    this.body = element(
      "tbody",
      {},
      rows.map((row) =>
        element(
          "tr",
          {},
          columns.map((name) => cell(row, name)),
        ),
      ),
    );
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
    this.table = element("table", { class: "wide" }, element("thead", {}, element("tr", {}, top)), this.body);
    fill(
      this.node,
      element(
        "div",
        { class: "controls" },
        field("Filter", filter),
        element("button", { type: "button", id: "csv", onclick: () => this.save(columns) }, "Save as CSV"),
      ),
      this.count,
      element("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "heads" }, this.table),
    );
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
