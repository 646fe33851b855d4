// What Compare computes: which head stands beside another, where two texts share tokens, how far two maps are apart.

// The layer and head of another run at the same place.
function nearest(run, layer, head) {
  const index = Math.min(layer, run.layers.length - 1);
  return [index, Math.min(head, run.layers[index].heads - 1)];
}

// Another head to compare with: the next of the story or, without one, the next that has a role; else the next head.
function beside(run, layer, head) {
  const isOther = (l, h) => l !== layer.index || h !== head;
  const card = run.story && run.story.cards.find((one) => isOther(one.layer, one.head));
  if (card) return [card.layer, card.head];
  const heads = run.heads();
  const from = heads.findIndex((one) => one.layer === layer && one.head === head);
  const own = layer.role(head);
  const next = range(heads.length - 1)
    .map((i) => heads[(from + 1 + i) % heads.length])
    .find((one) => {
      const role = one.layer.role(one.head);
      return role && !DULL.has(role.role) && (!own || role.role !== own.role);
    });
  return next ? [next.layer.index, next.head] : [layer.index, (head + 1) % layer.heads];
}

const DULL = new Set(["broad", "separator", "first", "sink", "resting only"]); // roles that say little
const ALIGN = 4e6; // cells of the table that aligns two texts, at most

const percent = (share) => `${number(100 * share, 2)} %`;
const sameShape = (a, b) => a[1] === b[1] && a[2] === b[2];

function meter(share) {
  const width = clamp(share, 0, 1) * 40;
  return shape(
    "svg",
    { width: 40, height: 6, viewBox: "0 0 40 6" },
    shape("rect", { width: 40, height: 6, rx: 3, fill: "var(--edge)" }),
    shape("rect", { width: Math.max(width, 1), height: 6, rx: 3, fill: "var(--line)" }),
  );
}

// A − B: where the units are the same, by position; else over those that both share.
function differenceOf(a, b) {
  const same = a.rows.length === b.rows.length && a.cols.length === b.cols.length;
  const pooled = a.layer.pooled || b.layer.pooled;
  if (same && (pooled || (sameWords(a.rows, b.rows) && sameWords(a.cols, b.cols)))) return Picture.difference(a, b);
  const shared = pooled ? null : { rows: alignedUnits(a.rows, b.rows), cols: alignedUnits(a.cols, b.cols) };
  if (shared && shared.rows && shared.cols && shared.rows.length && shared.cols.length) {
    const parts = [a, b].map((picture, side) => restricted(picture, shared, side));
    return Object.assign(Picture.difference(...parts), { shared });
  }
  const byPosition = Picture.difference(a, b);
  return byPosition && Object.assign(byPosition, { byPosition: true });
}

// The rows and columns of a picture that another shares.
function restricted({ layer, head, rows, cols, values }, shared, side) {
  const [r, c] = [shared.rows, shared.cols].map((pairs) => pairs.map((pair) => pair[side]));
  const chosen = Float32Array.from(
    range(r.length * c.length),
    (i) => values[r[Math.floor(i / c.length)] * cols.length + c[i % c.length]],
  );
  const [few, wide] = [r.map((i) => rows[i]), c.map((j) => cols[j])];
  return new Picture(layer, head, few, wide, chosen, largest(chosen));
}

// The mean mass of the shared queries of a picture on keys that the other does not have.
function elsewhere(picture, shared, side) {
  const keys = new Set(shared.cols.map((pair) => pair[side]));
  let total = 0;
  for (const pair of shared.rows)
    for (let j = 0; j < picture.cols.length; j++) if (!keys.has(j)) total += picture.value(pair[side], j);
  return total / shared.rows.length;
}

// Pairs [in a, in b] of a longest common subsequence of units, by their labels; null if the texts are too long for it.
function alignedUnits(a, b) {
  const same = (i, j) => a[i][2] === b[j][2];
  let [first, last] = [0, 0];
  const least = Math.min(a.length, b.length);
  while (first < least && same(first, first)) first++;
  while (last < least - first && same(a.length - 1 - last, b.length - 1 - last)) last++;
  const [n, m] = [a.length - first - last, b.length - first - last];
  if (n * m > ALIGN) return null;
  const pairs = range(first).map((i) => [i, i]);
  const width = m + 1;
  const table = new Uint16Array((n + 1) * width); // the length from (i, j) on
  for (let i = n - 1; i >= 0; i--)
    for (let j = m - 1; j >= 0; j--)
      table[i * width + j] = same(first + i, first + j)
        ? table[(i + 1) * width + j + 1] + 1
        : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  for (let [i, j] = [0, 0]; i < n && j < m;) {
    if (same(first + i, first + j)) pairs.push([first + i++, first + j++]);
    else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i++;
    else j++;
  }
  return [...pairs, ...range(last).map((i) => [a.length - last + i, b.length - last + i])];
}

// The total variation distance of the rows of two maps, the mean over rows.
function distance(a, b, rows, cols) {
  let total = 0;
  for (let i = 0; i < rows * cols; i++) total += Math.abs(a[i] - b[i]);
  return total / 2 / rows;
}

const sameWords = (a, b) => a.every(([, , label], i) => label === b[i][2]);
