// What one answer kept and read, built from the `sparse` fields of a stream's chunks.
//
// Step 0 is the end of the prompt; step k is the k-th decode step after it. A row is one KV head of
// one layer; its positions are indices in the text (prompt and answer together).

export class Recording {
  constructor() {
    this.facts = null; // the newest numbers: method, bytes, truncated ...
    this.retained = [];
    this.reads = [];
    this.memory = []; // resident and dense bytes, by step as far as chunks told
  }

  add(sparse) {
    if (sparse.retained.length && sparse.retained[0].event === "prefill") {
      this.retained = [];
      this.reads = [];
      this.memory = [];
    }
    this.retained.push(...sparse.retained);
    this.reads.push(...sparse.reads);
    this.facts = { ...sparse, retained: undefined, reads: undefined };
    this.memory[this.steps] = { resident: sparse.resident_bytes, dense: sparse.dense_bytes };
  }

  get isEmpty() {
    return this.retained.length === 0;
  }

  get steps() {
    return this.reads.length;
  }

  memoryAt(step) {
    for (let k = step; k >= 0; k--) if (this.memory[k]) return this.memory[k];
    return { resident: this.facts.resident_bytes, dense: this.facts.dense_bytes };
  }

  // {length, rows: [{layer, head, kept, read, readsAll}], bytesRead}: `kept` and `read` are ascending.
  at(step) {
    const read = step > 0 ? this.reads[step - 1] : null;
    const first = this.retained[0].computed;
    const length = read ? read.position + 1 : first;
    let base = this.retained[0];
    for (const entry of this.retained) if (entry.computed <= length) base = entry;
    const rows = [];
    for (const layer of Object.keys(base.positions).map(Number).sort((a, b) => a - b)) {
      const window = this.facts.windows?.[layer] ?? 0;
      base.positions[layer].forEach((positions, head) => {
        let kept = positions.slice();
        for (let p = base.computed; p < length; p++) kept.push(p);
        if (window) kept = kept.filter((p) => p >= length - window);
        const chosen = read?.positions[layer];
        const readNow = !read ? [] : chosen ? chosen[head].slice().sort((a, b) => a - b) : kept;
        rows.push({ layer, head, kept, read: readNow, readsAll: Boolean(read) && !chosen });
      });
    }
    return { length, rows, bytesRead: read ? read.bytes_read : null };
  }
}

// Share of each of `bins` equal parts of [0, length) that `positions` covers, in [0, 1].
export function density(positions, length, bins) {
  const found = new Float32Array(bins);
  for (const p of positions) {
    if (p < length) found[Math.floor((p * bins) / length)] += 1;
  }
  for (let b = 0; b < bins; b++) {
    const size = Math.ceil(((b + 1) * length) / bins) - Math.ceil((b * length) / bins);
    if (size > 0) found[b] = Math.min(1, found[b] / size);
  }
  return found;
}

// Per position, in how many rows it is kept.
export function keptBy(state) {
  const found = new Uint32Array(state.length);
  for (const row of state.rows) for (const p of row.kept) if (p < state.length) found[p] += 1;
  return found;
}

// One line per layer: fewest and most tokens kept by its heads, and read by the step.
export function byLayer(state) {
  const layers = new Map();
  for (const row of state.rows) {
    const seen = layers.get(row.layer) ?? { layer: row.layer, kept: [], read: [] };
    seen.kept.push(row.kept.length);
    seen.read.push(row.read.length);
    layers.set(row.layer, seen);
  }
  return [...layers.values()];
}

// A number of bytes for people.
export function bytes(value) {
  if (value == null) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let k = 0;
  while (value >= 1024 && k < units.length - 1) {
    value /= 1024;
    k += 1;
  }
  return `${k === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[k]}`;
}
