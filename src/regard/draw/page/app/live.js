// The served page: a form to look at another text, its progress, and exact crops when zoomed in.

class Live {
  constructor(about) {
    this.about = about; // { models: [{ name, kind }], model, text, limit, most, crop, job: of the first sentence }
    this.job = null;
  }

  begin(app) {
    this.app = app;
    this.form = this.buildForm();
    document.getElementById("top").after(this.form);
    window.addEventListener(
      "pagehide",
      () =>
        this.job && this.job !== this.about.job && fetch(`api/jobs/${this.job}`, { method: "DELETE", keepalive: true }),
    );
    if (app.data) this.record = this.about.job;
    else if (this.about.job) this.run(() => this.about.job);
  }

  header() {}

  buildForm() {
    const { about } = this;
    this.text = element("textarea", {
      id: "live-text",
      rows: 2,
      maxlength: about.limit,
      "aria-label": "text",
      placeholder: "A text to look at",
      dir: "auto",
      value: about.text || "",
      onkeydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && this.form.requestSubmit(),
    });
    this.model = element(
      "select",
      { id: "live-model", onchange: () => this.chosen() },
      about.models.map(({ name, kind }) =>
        element("option", { value: name, selected: name === about.model }, `${name} (${kind})`),
      ),
    );
    this.more = element("input", { id: "live-more", type: "number", min: 0, max: about.most, value: 0 });
    this.go = element("button", { id: "live-go" }, "Look");
    this.stop = element(
      "button",
      { id: "live-stop", type: "button", hidden: true, onclick: () => this.cancel() },
      "Stop",
    );
    this.bar = element("progress", { max: 1, value: 0, hidden: true, "aria-label": "progress" });
    this.status = element("span", { role: "status", id: "live-status" });
    this.error = element("p", { role: "alert", class: "status", id: "live-error" });
    this.chosen();
    return element(
      "form",
      { class: "live", onsubmit: (event) => this.ask(event) },
      this.text,
      element(
        "div",
        { class: "controls" },
        field("Model", this.model),
        field("Generate", this.more),
        this.go,
        this.stop,
        this.bar,
        this.status,
      ),
      this.error,
    );
  }

  // An encoder cannot generate.
  chosen() {
    this.more.disabled = this.about.models.some(({ name, kind }) => name === this.model.value && kind === "encoder");
  }

  ask(event) {
    event.preventDefault();
    const generate = this.more.disabled ? 0 : Number(this.more.value) || 0;
    return this.run(
      async () =>
        (await this.call("POST", "api/look", { text: this.text.value, model: this.model.value, generate })).job,
    );
  }

  // Follow a job to its end: the page of another text, or what `take` does with its result.
  async run(begun, take = null) {
    if (this.go.disabled) return;
    this.busy(true);
    this.status.textContent = this.error.textContent = "";
    try {
      this.job = await begun();
      await this.follow(take);
    } catch (error) {
      this.status.textContent = "";
      this.error.textContent = error.message;
    }
    this.job = null;
    this.busy(false);
  }

  async follow(take) {
    for (let wait = 60; ; wait = Math.min(2 * wait, 800)) {
      const now = await this.call("GET", `api/jobs/${this.job}`, null, 5);
      this.bar.value = now.progress;
      this.status.textContent = now.message;
      if (now.state === "failed" || now.state === "stopped") throw new Error(now.message);
      if (now.state === "done") break;
      await new Promise((done) => setTimeout(done, wait));
    }
    const result = await this.call("GET", `api/jobs/${this.job}/page`);
    if (take) {
      this.status.textContent = "";
      return take(result);
    }
    const { meta, blobs } = result;
    this.record = this.job;
    this.status.textContent = meta.generated ? `generated: ${meta.generated}` : "";
    this.app.load(new Data(meta, (name) => blobs[name]));
  }

  // What changes without a head, computed now.
  without(layer, head) {
    const { record } = this;
    const { run } = this.app;
    return this.run(
      async () => (await this.call("POST", `api/jobs/${record}/without`, { layer, head })).job,
      (found) => {
        run.effects = run.effects || { ...found, heads: {} };
        Object.assign(run.effects.heads, found.heads);
        this.app.show();
      },
    );
  }

  busy(on) {
    this.go.disabled = on;
    this.stop.hidden = this.bar.hidden = !on;
    this.bar.value = 0;
  }

  cancel() {
    if (this.job) this.call("DELETE", `api/jobs/${this.job}`).catch(() => {});
  }

  // Send a request to the server; if it is too busy to answer, again up to `again` times.
  async call(method, path, body, again = 0) {
    const answer = await fetch(path, {
      method,
      headers: body ? { "content-type": "application/json" } : {},
      body: body ? JSON.stringify(body) : undefined,
    });
    if (answer.status === 503 && again) {
      await new Promise((done) => setTimeout(done, 1000));
      return this.call(method, path, body, again - 1);
    }
    const content = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
    if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
    return content;
  }

  // Fetch exact weights of the visible part of a pooled map, if it is small enough.
  async zoomed(view) {
    const { map } = view;
    const { picture } = map;
    const { layer, head } = picture;
    if (!layer.pooled || !this.record || !map.exact) return;
    const [r0, r1, c0, c1] = map.window;
    const [tall, wide] = map.tokens;
    const part = [Math.floor(r0 * tall), Math.ceil(r1 * tall), Math.floor(c0 * wide), Math.ceil(c1 * wide)];
    if (part[1] - part[0] > this.about.crop || part[3] - part[2] > this.about.crop) return;
    const inside = (crop) =>
      crop.head === head &&
      crop.row <= part[0] &&
      crop.col <= part[2] &&
      crop.row + crop.shape[1] >= part[1] &&
      crop.col + crop.shape[2] >= part[3];
    if (layer.crops.some(inside)) return;
    const asked = (this.asked = [layer.index, head, ...part].join());
    await new Promise((done) => setTimeout(done, 150)); // until zooming has stopped
    if (this.asked !== asked) return;
    const [rows, cols] = [`${part[0]}-${part[1]}`, `${part[2]}-${part[3]}`];
    const query = `layer=${layer.index}&head=${head}&rows=${rows}&cols=${cols}`;
    const crop = await this.call("GET", `api/jobs/${this.record}/crop?${query}`).catch(() => null);
    if (!crop) return;
    crop.codes = integers(
      Uint8Array.from(atob(crop.data), (letter) => letter.charCodeAt(0)),
      crop,
    );
    layer.crops.push(crop);
    if (map.picture !== picture) return;
    map.paint();
    map.draw();
  }
}
