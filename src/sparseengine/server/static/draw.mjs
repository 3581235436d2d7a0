// The heat map: a line per layer and KV head, a column per position (or per several).

import { density } from "./record.mjs";

const LABELS = 34; // pixels left of the map

export function layout(numRows, width) {
  const height = Math.max(2, Math.min(9, Math.floor(460 / Math.max(1, numRows))));
  return { left: LABELS, rowHeight: height, width: Math.max(40, width - LABELS), numRows };
}

// Paints a state; returns the layout, for `locate`.
export function paint(canvas, state, colours, promptLength) {
  const scale = globalThis.devicePixelRatio || 1;
  const plan = layout(state.rows.length, canvas.clientWidth);
  const total = plan.rowHeight * plan.numRows;
  canvas.style.height = `${total}px`;
  canvas.width = Math.round((plan.left + plan.width) * scale);
  canvas.height = Math.round(total * scale);
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.imageSmoothingEnabled = false;
  const bins = Math.max(1, Math.min(state.length, Math.round(plan.width * scale)));
  context.drawImage(picture(state, bins, colours), plan.left, 0, plan.width, total);
  context.fillStyle = colours.page;
  state.rows.forEach((row, i) => {
    if (i && row.head === 0 && plan.rowHeight > 2) context.fillRect(plan.left, i * plan.rowHeight, plan.width, 1);
  });
  label(context, state, plan, colours);
  if (promptLength < state.length) {
    context.fillStyle = colours.text;
    context.fillRect(plan.left + (promptLength / state.length) * plan.width, 0, 1, total);
  }
  return plan;
}

// A pixel per row and bin: the colour of what was dropped, under kept, under read.
function picture(state, bins, colours) {
  const image = new ImageData(bins, state.rows.length);
  const [dropped, kept, read] = [colours.dropped, colours.kept, colours.read].map(channels);
  state.rows.forEach((row, i) => {
    const keeps = density(row.kept, state.length, bins);
    const reads = density(row.read, state.length, bins);
    for (let b = 0; b < bins; b++) {
      const at = 4 * (i * bins + b);
      for (let c = 0; c < 3; c++) {
        const below = mix(dropped[c], kept[c], keeps[b]);
        image.data[at + c] = mix(below, read[c], reads[b]);
      }
      image.data[at + 3] = 255;
    }
  });
  const made = document.createElement("canvas");
  made.width = bins;
  made.height = state.rows.length;
  made.getContext("2d").putImageData(image, 0, 0);
  return made;
}

function mix(from, to, share) {
  return share ? from + (to - from) * (0.2 + 0.8 * share) : from;
}

// "rgb(1, 2, 3)" as numbers.
function channels(colour) {
  return colour.match(/[\d.]+/g).slice(0, 3).map(Number);
}

function label(context, state, plan, colours) {
  context.fillStyle = colours.text;
  context.font = "10px system-ui, sans-serif";
  context.textBaseline = "top";
  context.textAlign = "right";
  let free = 0;
  state.rows.forEach((row, i) => {
    const y = i * plan.rowHeight;
    if (row.head !== 0 || y < free) return;
    context.fillText(`L${row.layer}`, plan.left - 6, y);
    free = y + 12;
  });
}

// {row, position} under a point of the canvas, in CSS pixels; null beside the map.
export function locate(plan, state, x, y) {
  const row = Math.floor(y / plan.rowHeight);
  const position = Math.floor(((x - plan.left) / plan.width) * state.length);
  if (row < 0 || row >= state.rows.length || position < 0 || position >= state.length) return null;
  return { row: state.rows[row], position };
}
