// Puts the page together: orders, progress, previews, tabs.

import { ask, cancel, events, order } from "/page/api.js";
import { fill, prepare, read } from "/page/form.js";
import { addToGallery, captionOf, element, image } from "/page/gallery.js";

const byId = (name) => document.getElementById(name);
let running = null;

function say(text, isBad = false) {
  byId("status").textContent = text;
  byId("status").classList.toggle("bad", isBad);
}

function setRunning(id) {
  running = id;
  byId("cancel").disabled = id === null;
  byId("go").disabled = byId("compare").disabled = id !== null;
  if (id === null) byId("progress").value = 0;
}

// Draws an order, shows it in figures of its own, and returns its pictures.
async function draw(body, isKept = true) {
  const figures = [];
  const state = await order({ ...body, preview_every: Math.max(1, Math.round(body.steps / 10)) });
  setRunning(state.id);
  state.pictures.forEach((picture) => figures.push(figureOf(picture, body)));
  byId("now").append(...figures);
  const made = [];
  let last = state;
  for await (const [name, content] of events(state.id)) {
    if (name === "picture") {
      made.push(content);
      fillFigure(figures[content.number], `data:image/png;base64,${content.png}`, content);
      if (isKept) addToGallery(content, fill);
    } else if (name === "preview") {
      const figure = figures[content.number];
      const picture = last.pictures[content.number];
      fillFigure(figure, `data:image/jpeg;base64,${content.jpeg}`, picture, content.step);
    } else {
      last = content;
      tell(content);
    }
  }
  if (last.state === "failed") throw new Error(last.error.message);
  if (last.state === "cancelled") throw new Error("Cancelled.");
  return { made, notes: last.notes };
}

function figureOf(picture, body) {
  const caption = element("figcaption", { textContent: body.eager ? "eager" : "Strop" });
  const empty = "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///ywAAAAAAQABAAACAUwAOw==";
  return element("figure", {}, image(empty, picture, "not drawn yet"), caption);
}

function fillFigure(figure, source, picture, step = 0) {
  figure.querySelector("img").replaceWith(image(source, picture));
  const engine = picture.eager ? "eager" : "Strop";
  const text = step ? `${engine}: step ${step} of ${picture.steps}` : captionOf(picture);
  figure.querySelector("figcaption").textContent = text;
}

function tell(state) {
  if (state.state === "waiting") {
    say(state.before ? `Waiting behind ${state.before} pictures.` : "Waiting.");
  } else if (state.state === "drawing") {
    say(`Step ${state.step} of ${state.steps}.`);
    byId("progress").value = state.step / state.steps;
  }
}

async function start(work) {
  if (running !== null || !byId("form").reportValidity()) return;
  byId("now").replaceChildren();
  setRunning("");
  say("Asking.");
  byId("status").scrollIntoView({ block: "nearest" }); // on a phone it is below the form
  try {
    say(await work(read()));
  } catch (error) {
    say(error.message, true);
  } finally {
    setRunning(null);
  }
}

async function drawOnce(body) {
  const { made, notes } = await draw(body);
  return [...new Set(made.map(captionOf)), ...notes].join(". ");
}

// Each is drawn alone, one after the other, from the same noise.
async function drawBoth(body) {
  const seed = body.seed ?? Math.floor(Math.random() * 2 ** 31);
  const common = { ...body, seed, count: 1, alone: true };
  await draw({ ...common, steps: 2, eager: true }, false); // what only a first call does
  byId("now").replaceChildren();
  const eager = await draw({ ...common, eager: true });
  const ours = await draw(common);
  const [slow, fast] = [eager.made[0].drawn_s, ours.made[0].drawn_s];
  const ratio = (slow / fast).toFixed(2);
  return `eager ${slow.toFixed(2)} s, Strop ${fast.toFixed(2)} s: ${ratio} times as fast`;
}

async function readReport() {
  byId("report").textContent = "reading…";
  try {
    byId("report").textContent = await (await ask("/api/report")).text();
  } catch (error) {
    byId("report").textContent = error.message;
  }
}

function prepareTabs() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const select = (chosen) => {
    for (const tab of tabs) {
      const is = tab === chosen;
      tab.setAttribute("aria-selected", is);
      tab.tabIndex = is ? 0 : -1;
      byId(tab.getAttribute("aria-controls")).hidden = !is;
    }
    if (chosen.id === "tab-report") readReport();
  };
  for (const [number, tab] of tabs.entries()) {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const next = tabs[(number + by + tabs.length) % tabs.length];
      next.focus();
      select(next);
    });
  }
}

function prepareKeys() {
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    start(drawOnce);
  });
  byId("compare").addEventListener("click", () => start(drawBoth));
  byId("cancel").addEventListener("click", () => running && cancel(running));
  byId("again").addEventListener("click", readReport);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) start(drawOnce);
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) cancel(running);
  });
}

async function begin() {
  prepareTabs();
  prepareKeys();
  try {
    const model = await (await ask("/api/model")).json();
    prepare(model);
    byId("model").textContent = `${model.name}, sizes in multiples of ${model.multiple_of}`;
  } catch (error) {
    say(error.message, true);
  }
}

begin();
