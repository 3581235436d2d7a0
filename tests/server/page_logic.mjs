// The page's logic without a browser: run by test_ui.py with a folder of modules as argument.

import assert from "node:assert/strict";
import { pathToFileURL } from "node:url";

const load = (name) => import(pathToFileURL(`${process.argv[2]}/${name}`).href);
const { readEvents } = await load("events.mjs");
const { Recording, byLayer, bytes, density, keptBy } = await load("record.mjs");
const { layout, locate } = await load("draw.mjs");
const { readable } = await load("tokens.mjs");

// events, split at every byte and with every line ending
const encoder = new TextEncoder();
for (const end of ["\n", "\r\n", "\r"]) {
  const wire = encoder.encode(`data: {"a":"é"}${end}${end}: note${end}data: {"a":2}${end}${end}data: [DONE]${end}${end}`);
  for (let cut = 0; cut <= wire.length; cut++) {
    const body = new ReadableStream({
      start(controller) {
        controller.enqueue(wire.slice(0, cut));
        controller.enqueue(wire.slice(cut));
        controller.close();
      },
    });
    const found = [];
    for await (const event of readEvents({ body })) found.push(event.a);
    assert.deepEqual(found, ["é", 2], `${JSON.stringify(end)} cut at ${cut}`);
  }
}

// a recording: prompt of 6, one decode step, an eviction, a second step; layer 1 has a window of 3
const facts = { method: "m", prompt_tokens: 6, resident_bytes: 10, dense_bytes: 20, windows: { 1: 3 } };
const chunk = (values) => ({ ...facts, retained: [], reads: [], ...values });
const recording = new Recording();
assert(recording.isEmpty);
recording.add(chunk({ retained: [{ event: "prefill", computed: 6, positions: { 0: [[0, 1, 5], [0, 4, 5]], 1: [[3, 4, 5]] } }] }));
assert.equal(recording.steps, 0);
assert.deepEqual(recording.at(0).rows.map((r) => r.kept), [[0, 1, 5], [0, 4, 5], [3, 4, 5]]);
assert.deepEqual(recording.at(0).rows[0].read, []);
recording.add(chunk({ resident_bytes: 12, reads: [{ position: 6, positions: { 0: [[5, 0], [4, 6]] }, bytes_read: 7 }] }));
const first = recording.at(1);
assert.equal(first.length, 7);
assert.deepEqual(first.rows.map((r) => r.kept), [[0, 1, 5, 6], [0, 4, 5, 6], [4, 5, 6]]);
assert.deepEqual(first.rows.map((r) => r.read), [[0, 5], [4, 6], [4, 5, 6]]);
assert.deepEqual(first.rows.map((r) => r.readsAll), [false, false, true]);
assert.equal(first.bytesRead, 7);
recording.add(chunk({
  resident_bytes: 9,
  retained: [{ event: "evict", computed: 8, positions: { 0: [[0, 7], [0, 7]], 1: [[5, 6, 7]] } }],
  reads: [{ position: 7, positions: {}, bytes_read: 8 }],
}));
assert.deepEqual(recording.at(2).rows.map((r) => r.kept), [[0, 7], [0, 7], [5, 6, 7]]);
assert.deepEqual(recording.at(1).rows[0].kept, [0, 1, 5, 6], "the past stays");
assert.deepEqual([0, 1, 2].map((k) => recording.memoryAt(k).resident), [10, 12, 9]);
assert.deepEqual([...keptBy(recording.at(2))], [2, 0, 0, 0, 0, 1, 1, 3]);
assert.deepEqual(byLayer(first), [
  { layer: 0, kept: [4, 4], read: [2, 2] },
  { layer: 1, kept: [3], read: [3] },
]);
recording.add(chunk({ retained: [{ event: "prefill", computed: 6, positions: { 0: [[0], [1]], 1: [[4]] } }] }));
assert.equal(recording.steps, 0, "a prompt that ends again begins anew");
assert.deepEqual(recording.at(0).rows.map((r) => r.kept), [[0], [1], [4]]);

// shares of bins; a place of the picture is the row and position it shows
assert.deepEqual([...density([0, 1, 5], 6, 3)], [1, 0, 0.5]);
assert.deepEqual([...density([0, 9], 10, 3)].map((d) => d.toFixed(2)), ["0.25", "0.00", "0.33"]);
const plan = layout(first.rows.length, 134);
const row = first.rows[1];
assert.deepEqual(locate(plan, first, plan.left + 50, plan.rowHeight * 1.5), { row, position: 3 });
assert.equal(locate(plan, first, plan.left - 1, 0), null);
assert.equal(locate(plan, first, plan.left, plan.rowHeight * 3), null);

// words
assert.deepEqual(readable(["Ġthe", "Ċ", "Ã©", "<|im_end|>"]), [" the", "\n", "é", "<|im_end|>"]);
assert.deepEqual(readable(["▁the", "é"]), [" the", "é"]);
assert.deepEqual([null, 0, 1023, 1536, 200 * 1024].map(bytes), ["–", "0 B", "1023 B", "1.5 KiB", "200 KiB"]);
console.log("page logic: all well");
