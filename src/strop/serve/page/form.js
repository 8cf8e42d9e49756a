// Reads the form, and fills it.

import { element } from "/page/gallery.js";

const NUMBERS = ["width", "height", "count", "steps", "guidance"];
const MOST_SIDE = 1024;
const field = (name) => document.getElementById(name);
let start = null;

export function prepare(model) {
  for (const side of ["width", "height"]) {
    Object.assign(field(side), { min: model.multiple_of, step: model.multiple_of });
    field(side).value = model[side];
  }
  field("steps").value = model.steps;
  field("steps").max = model.most_steps;
  field("guidance").value = model.guidance;
  field("count").max = model.most_count;
  field("compare").hidden = !model.eager;
  prepareSamplers(model.samplers);
  field("weighing").hidden = !model.prompt_weights;
  field("loras").hidden = model.loras.length === 0;
  for (const [number, name] of model.loras.entries()) field("loras").append(slider(name, number));
  field("strength").addEventListener("input", showStrength);
  field("forget").addEventListener("click", forget);
  field("file").addEventListener("change", () => choose(field("file").files[0]));
  prepareDrop(document.body);
  if (model.name.startsWith("sprites")) {
    field("prompt").value = "a red circle above a blue square on a white background";
  }
}

export function read() {
  const body = { prompt: field("prompt").value, negative: field("negative").value };
  body.prompt_weights = field("brackets").value === "weights";
  if (field("sampler").value) {
    Object.assign(body, { sampler: field("sampler").value, schedule: field("schedule").value });
  }
  for (const name of NUMBERS) body[name] = Number(field(name).value);
  if (field("seed").value !== "") body.seed = Number(field("seed").value);
  body.loras = {};
  for (const input of field("loras").querySelectorAll("input")) {
    if (Number(input.value)) body.loras[input.dataset.name] = Number(input.value);
  }
  if (start) Object.assign(body, { start, strength: Number(field("strength").value) });
  return body;
}

export function fill(picture) {
  for (const name of ["prompt", "negative", "width", "height", "steps", "guidance", "seed"]) {
    field(name).value = picture[name];
  }
  field("count").value = 1;
  field("brackets").value = picture.prompt_weights ? "weights" : "";
  field("sampler").value = picture.sampler;
  field("sampler").dispatchEvent(new Event("change"));
  if (picture.sampler) field("schedule").value = picture.schedule;
  for (const input of field("loras").querySelectorAll("input")) {
    input.value = picture.loras[input.dataset.name] || 0;
    input.dispatchEvent(new Event("input"));
  }
  field("prompt").focus();
}

// The first of a sampler's schedules is its own, "automatic".
function prepareSamplers(samplers) {
  const option = (value, text) => element("option", { value, textContent: text || value });
  field("sampling").hidden = Object.keys(samplers).length === 0;
  field("sampler").append(option("", "the model's own"), ...Object.keys(samplers).map((one) => option(one)));
  const change = () => {
    const known = samplers[field("sampler").value];
    field("schedule").replaceChildren(...["automatic", ...(known || [])].map((one) => option(one)));
    field("schedule").disabled = !known;
  };
  field("sampler").addEventListener("change", change);
  change();
}

function slider(name, number) {
  const id = `lora-${number}`;
  const value = element("output", { textContent: "0" });
  const input = element("input", { id, type: "range", min: -1, max: 2, step: 0.05, value: 0 });
  input.value = 0;
  input.dataset.name = name;
  input.addEventListener("input", () => { value.textContent = input.value; });
  const label = element("label", { htmlFor: id }, `${name} `, value);
  return element("div", { className: "field" }, label, input);
}

function showStrength() {
  field("strength-value").textContent = field("strength").value;
}

function prepareDrop(target) {
  const over = (is) => field("drop").classList.toggle("over", is);
  target.addEventListener("dragover", (event) => { event.preventDefault(); over(true); });
  target.addEventListener("dragleave", () => over(false));
  target.addEventListener("drop", (event) => {
    event.preventDefault();
    over(false);
    choose(event.dataTransfer.files[0]);
  });
}

// Any picture that the browser reads is sent as a PNG of at most 1024 pixels a side.
async function choose(file) {
  if (!file) return;
  try {
    const bitmap = await createImageBitmap(file);
    const share = Math.min(1, MOST_SIDE / Math.max(bitmap.width, bitmap.height));
    const canvas = element("canvas", {
      width: Math.max(1, Math.round(bitmap.width * share)),
      height: Math.max(1, Math.round(bitmap.height * share)),
    });
    canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
    start = canvas.toDataURL("image/png");
    field("thumb").src = start;
    field("chosen").hidden = false;
    field("drop").textContent = file.name;
  } catch {
    field("drop").textContent = "That is no picture. Choose another one";
  }
}

function forget() {
  start = null;
  field("file").value = "";
  field("chosen").hidden = true;
  field("drop").textContent = "Drop a picture here, or choose one";
  field("file").focus();
}
