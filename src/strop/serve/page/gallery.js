// Shows pictures that are done, with what draws them again.

const SMALL = 256;
const SHOWN = ["prompt", "negative", "prompt_weights", "width", "height", "steps", "guidance", "seed", "strength", "sampler", "schedule"];

export function element(name, attributes = {}, ...children) {
  const made = Object.assign(document.createElement(name), attributes);
  made.append(...children);
  return made;
}

export function image(source, picture, text) {
  const made = element("img", { src: source, alt: text || picture.prompt });
  made.width = picture.width;
  made.height = picture.height;
  if (picture.width < SMALL) made.className = "small";
  return made;
}

export function addToGallery(picture, reuse) {
  const source = `data:image/png;base64,${picture.png}`;
  const button = element("button", { type: "button" }, image(source, picture));
  button.setAttribute("aria-label", `Show ${picture.prompt}, seed ${picture.seed}`);
  button.addEventListener("click", () => show(picture, source, reuse));
  const caption = element("figcaption", { textContent: captionOf(picture) });
  const item = element("li", {}, element("figure", {}, button, caption));
  document.getElementById("gallery").prepend(item);
  document.getElementById("empty").hidden = true;
}

export function captionOf(picture) {
  const engine = picture.eager ? "eager" : "Strop";
  const shared = picture.batch > 1 ? `, ${picture.batch} at once` : "";
  return `${engine}: ${picture.drawn_s.toFixed(2)} s${shared}`;
}

function show(picture, source, reuse) {
  const dialog = document.getElementById("shown");
  const target = document.getElementById("shown-picture");
  Object.assign(target, { src: source, alt: picture.prompt });
  target.className = picture.width < SMALL ? "small" : "";
  document.getElementById("parameters").replaceChildren(...rowsOf(picture));
  const download = document.getElementById("download");
  Object.assign(download, { href: source, download: `strop-${picture.seed}.png` });
  dialog.returnValue = "";
  dialog.showModal();
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "reuse") reuse(picture);
  }, { once: true });
}

function rowsOf(picture) {
  const rows = SHOWN.filter((name) => picture[name] !== null && picture[name] !== "" && picture[name] !== false)
    .map((name) => [name, picture[name]]);
  for (const [name, scale] of Object.entries(picture.loras)) rows.push([`LoRA ${name}`, scale]);
  rows.push(["drawn by", captionOf(picture)], ["waited", `${picture.waited_s.toFixed(2)} s`]);
  return rows.flatMap(([name, value]) => [
    element("dt", { textContent: name }),
    element("dd", { textContent: value }),
  ]);
}
