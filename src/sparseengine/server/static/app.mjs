// The page: talks to the server's public routes and shows what a `Recording` says.

import { locate, paint } from "./draw.mjs";
import { readEvents } from "./events.mjs";
import { Recording, byLayer, bytes, keptBy } from "./record.mjs";
import { readable } from "./tokens.mjs";

const $ = (id) => document.getElementById(id);
const SHOWN_TOKENS = 6000; // of the text, from its end
const messages = [];
let info = null; // GET /server_info
let key = sessionStorage.getItem("sparseengine-key") ?? "";
let running = null; // AbortController of the answer that comes
let shown = null; // what the right half shows: {recording, prompt: [texts], answer: [texts]}
let plan = null; // the layout of the painted map
let state = null; // what it shows
let follows = true; // the newest step
let pointed = false; // somebody has pointed at the picture

// ── the server ──────────────────────────────────────────────────────────────────────────────────

async function call(path, body, signal) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  const response = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body ? JSON.stringify(body) : undefined,
    signal,
  });
  if (response.status === 401) $("key-form").hidden = false;
  if (!response.ok) {
    const found = await response.json().catch(() => null);
    throw new Error(found?.error?.message ?? `${path}: status ${response.status}`);
  }
  return response;
}

async function connect() {
  try {
    info = await (await call("server_info")).json();
    $("key-form").hidden = true;
    const context = info.max_model_len.toLocaleString("en");
    $("served").textContent = `${info.models[0]} on ${info.device}, up to ${context} tokens`;
    fillMethods();
    fillServer();
    const document_ = await (await call("openapi.json")).json();
    const fields = document_.components?.schemas?.SparseFields?.properties ?? {};
    $("mass-choice").hidden = !("dropped_mass" in fields);
  } catch (error) {
    $("served").textContent = `not connected: ${error.message}`;
  }
}

function traits(name) {
  return info?.explain?.methods?.find((m) => m.name === name)?.traits ?? {};
}

function fillMethods() {
  const options = info.methods.map((name) => {
    const family = traits(name).family;
    const words = name === info.default_method ? [family, "default"] : [family];
    const known = words.filter(Boolean);
    return new Option(known.length ? `${name} (${known.join(", ")})` : name, name);
  });
  $("method").replaceChildren(...options);
  $("method").value = info.default_method;
  methodChanged();
}

function methodChanged() {
  const takes = traits($("method").value).takes;
  const fixed = takes === "none";
  $("budget-kind").disabled = fixed;
  $("amount").disabled = fixed || !$("budget-kind").value;
}

function budgetKindChanged() {
  const kind = $("budget-kind").value;
  if (kind) $("amount").value = kind === "ratio" ? "0.25" : "256";
  methodChanged();
}

function fillServer() {
  const memory = info.memory ?? {};
  const layers = info.explain?.model?.layers;
  facts($("server"), {
    version: info.version,
    "requests at once": info.max_num_seqs,
    layers,
    weights: bytes(memory.weights),
    "KV pages": memory.kv_pages == null ? "–" : `${bytes(memory.kv_pages)} (${memory.total_pages} pages)`,
    "prefix cache": info.prefix_cache == null ? "none reported" : JSON.stringify(info.prefix_cache),
  });
}

function facts(list, values) {
  const parts = [];
  for (const [name, value] of Object.entries(values)) {
    parts.push(element("dt", name), element("dd", String(value ?? "–")));
  }
  list.replaceChildren(...parts);
}

function element(kind, text, className) {
  const made = document.createElement(kind);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ── the chat ────────────────────────────────────────────────────────────────────────────────────

function sparseFields() {
  const fields = { method: $("method").value, record: $("record").checked };
  const kind = $("budget-kind").value;
  const amount = $("amount").valueAsNumber;
  if (!$("amount").disabled && kind && !Number.isNaN(amount)) fields[kind] = amount;
  if (!$("mass-choice").hidden && $("mass").checked) fields.dropped_mass = true;
  return fields;
}

function addTurn(role, text) {
  const turn = element("div", "", `turn ${role}`);
  const body = element("span", text);
  turn.append(element("span", role === "user" ? "You" : role === "wrong" ? "Error" : "Model", "who"), body);
  $("talk").append(turn);
  $("talk").scrollTop = $("talk").scrollHeight;
  return body;
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  addTurn("user", text);
  const sparse = sparseFields();
  const answer = addTurn("assistant", "");
  running = new AbortController();
  setRunning(true);
  shown = { recording: new Recording(), prompt: [], answer: [], method: sparse.method };
  follows = true;
  clearNumbers();
  const begun = performance.now();
  let finish = null;
  try {
    const wanted = { model: info.models[0], messages };
    if (sparse.record) tellTokens(wanted, shown);
    const response = await call("v1/chat/completions", requestOf(wanted, sparse), running.signal);
    let reply = "";
    for await (const event of readEvents(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) showUsage(event.usage);
      const choice = event.choices[0];
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      reply += take(choice, answer);
    }
    messages.push({ role: "assistant", content: reply });
  } catch (error) {
    const isStop = error.name === "AbortError";
    if (isStop) finish = "stopped";
    else addTurn("wrong", error.message);
    if (answer.textContent) messages.push({ role: "assistant", content: answer.textContent });
    else messages.pop();
  } finally {
    running = null;
    setRunning(false);
    const seconds = (performance.now() - begun) / 1000;
    const count = shown.answer.length;
    const rate = count > 1 ? `, ${(count / seconds).toFixed(1)} tokens/s` : "";
    $("status").textContent = finish ? `${finish} after ${seconds.toFixed(1)} s${rate}` : "";
    redraw();
  }
}

function requestOf(wanted, sparse) {
  const body = {
    ...wanted,
    sparse,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: $("max-tokens").valueAsNumber || 128,
    logprobs: true, // names the tokens
  };
  const temperature = $("temperature").valueAsNumber;
  if (!Number.isNaN(temperature)) body.temperature = temperature;
  return body;
}

function take(choice, answer) {
  const { content, reasoning_content: reasoning } = choice.delta;
  if (reasoning) answer.before(element("span", reasoning, "reasoning"));
  if (content) answer.append(content);
  if (content || reasoning) $("talk").scrollTop = $("talk").scrollHeight;
  for (const token of choice.logprobs?.content ?? []) shown.answer.push(token.token);
  $("answer-tokens").textContent = shown.answer.length;
  if (choice.sparse) {
    shown.recording.add(choice.sparse);
    redraw();
  }
  return content ?? "";
}

async function tellTokens(wanted, into) {
  try {
    const body = { ...wanted, return_token_strs: true };
    const found = await (await call("tokenize", body)).json();
    into.prompt = readable(found.token_strs);
    redraw();
  } catch {
    into.prompt = []; // the picture goes without words
  }
}

function setRunning(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  if (is) $("status").textContent = "working …";
}

// ── the cache ───────────────────────────────────────────────────────────────────────────────────

function clearNumbers() {
  const ids = ["resident", "dense", "read", "dropped", "prompt-tokens", "answer-tokens", "cached", "miss"];
  for (const id of ids) $(id).textContent = "–";
  $("share").value = 0;
  $("pointed").textContent = $("record").checked ? "reading the prompt …" : "not recorded";
  $("summary").textContent = "";
  $("layers").replaceChildren();
  $("text").replaceChildren();
  $("step").disabled = true;
  $("map").getContext("2d").clearRect(0, 0, $("map").width, $("map").height);
  plan = state = null;
  pointed = false;
}

function missText(miss) {
  if (!miss) return "none";
  const at = miss.at === null ? "" : ` at token ${miss.at}`;
  return `${miss.reason}${at}${miss.detail ? `: ${miss.detail}` : ""}`;
}

function showUsage(usage) {
  const details = usage.prompt_tokens_details ?? {};
  $("prompt-tokens").textContent = usage.prompt_tokens;
  $("answer-tokens").textContent = usage.completion_tokens;
  $("cached").textContent = details.cached_tokens ?? 0;
  $("miss").textContent = missText(details.cache_miss);
}

let pending = false;

function redraw() {
  if (pending) return;
  pending = true;
  requestAnimationFrame(() => {
    pending = false;
    if (shown && !shown.recording.isEmpty) show(shown);
  });
}

function show({ recording, method }) {
  const { facts: now, steps } = recording;
  $("step").max = steps;
  $("step").disabled = steps === 0;
  if (follows) $("step").value = steps;
  const step = Math.min($("step").valueAsNumber, steps);
  state = recording.at(step);
  $("step-shown").textContent = step === 0 ? "0 (the prompt is done)" : `${step} of ${steps}`;
  const memory = recording.memoryAt(step);
  $("resident").textContent = `${bytes(memory.resident)} (${percent(memory.resident, memory.dense)})`;
  $("dense").textContent = bytes(memory.dense);
  $("share").value = memory.dense ? Math.min(1, memory.resident / memory.dense) : 0;
  $("read").textContent = bytes(state.bytesRead);
  $("prompt-tokens").textContent = now.prompt_tokens;
  $("dropped").textContent = droppedAt(now.dropped_mass, state.length - 1);
  if (!pointed) $("pointed").textContent = "Point at the picture to see which token a place stands for.";
  plan = paint($("map"), state, colours(), now.prompt_tokens);
  $("summary").textContent = summary(method, now);
  showLayers();
  if ($("text-part").open) showText(now.prompt_tokens);
}

function percent(part, whole) {
  return whole ? `${((100 * part) / whole).toFixed(0)} %` : "–";
}

function droppedAt(masses, position) {
  if (!masses?.length) return "not measured";
  const found = masses.find((m) => m.position === position) ?? masses[masses.length - 1];
  return `${(100 * found.mean).toFixed(1)} % (max ${(100 * found.max).toFixed(1)} %)`;
}

function summary(method, now) {
  const pairs = state.rows.length * state.length;
  const sum = (name) => state.rows.reduce((total, row) => total + row[name].length, 0);
  const budget = now.budget == null ? "" : `, budget ${now.budget} tokens`;
  const parts = [`${method}${budget}: ${percent(sum("kept"), pairs)} of ${state.length} positions kept`];
  if (state.bytesRead != null) parts.push(`${percent(sum("read"), pairs)} read by this step`);
  if (now.prefill_density != null) {
    parts.push(`prefill ${now.prefill} read ${percent(now.prefill_density, 1)} of its blocks`);
  }
  if (now.truncated) parts.push("the record is full: later steps are not shown");
  return parts.join("; ");
}

function showLayers() {
  const span = (numbers) => {
    const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
    return low === high ? String(low) : `${low} to ${high}`;
  };
  const lines = byLayer(state).map(({ layer, kept, read }) => {
    const line = document.createElement("tr");
    const head = element("th", String(layer));
    head.scope = "row";
    line.append(head, element("td", span(kept)), element("td", state.bytesRead == null ? "–" : span(read)));
    return line;
  });
  $("layers").replaceChildren(...lines);
}

function textAt(position, promptTokens) {
  return position < promptTokens ? shown.prompt[position] : shown.answer[position - promptTokens];
}

function showText(promptTokens) {
  const counts = keptBy(state);
  const first = Math.max(0, state.length - SHOWN_TOKENS);
  const made = [];
  for (let p = first; p < state.length; p++) {
    const span = element("span", textAt(p, promptTokens) ?? "·");
    const share = counts[p] / state.rows.length;
    span.style.setProperty("--share", share.toFixed(3));
    span.title = `position ${p}: kept by ${counts[p]} of ${state.rows.length} heads`;
    if (p >= promptTokens) span.classList.add("answer");
    if (!share) span.classList.add("gone");
    made.push(span);
  }
  $("text").replaceChildren(...made);
}

function colours() {
  const of = (id, name) => getComputedStyle($(id))[name];
  return {
    kept: of("swatch-kept", "backgroundColor"),
    read: of("swatch-read", "backgroundColor"),
    dropped: of("swatch-dropped", "backgroundColor"),
    text: of("map", "color"),
    page: of("map", "backgroundColor"),
  };
}

function point(event) {
  if (!state || !plan) return;
  const found = locate(plan, state, event.offsetX, event.offsetY);
  if (!found) return;
  pointed = true;
  const { row, position } = found;
  const what = row.read.includes(position) ? "kept and read" : row.kept.includes(position) ? "kept" : "dropped";
  const text = textAt(position, shown.recording.facts.prompt_tokens);
  const word = text == null ? "" : ` ${JSON.stringify(text)}`;
  $("pointed").textContent = `layer ${row.layer}, head ${row.head}, position ${position}${word}: ${what}`;
}

// ── what the user does ──────────────────────────────────────────────────────────────────────────

function setTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  else delete document.documentElement.dataset.theme;
  localStorage.setItem("sparseengine-theme", name);
  redraw();
}

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("message").value.trim();
  if (!text || running || !info) return;
  $("message").value = "";
  ask(text);
});
$("message").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("talk").replaceChildren();
  $("status").textContent = "";
  shown = null;
  clearNumbers();
  $("pointed").textContent = "Ask something to see what is kept.";
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value;
  sessionStorage.setItem("sparseengine-key", key);
  connect();
});
$("method").addEventListener("change", methodChanged);
$("budget-kind").addEventListener("change", budgetKindChanged);
$("step").addEventListener("input", () => {
  follows = $("step").value === $("step").max;
  redraw();
});
$("text-part").addEventListener("toggle", redraw);
$("map").addEventListener("pointermove", point);
$("map").addEventListener("pointerdown", point);
$("theme").addEventListener("change", () => setTheme($("theme").value));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
new ResizeObserver(redraw).observe($("watch"));

$("theme").value = localStorage.getItem("sparseengine-theme") ?? "";
setTheme($("theme").value);
connect();
