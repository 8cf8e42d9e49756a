// Asks the server. A token is asked for once, and kept for this visit.

const KEY = "strop-token";

export async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.status === 401) {
    await askForToken();
    return ask(path, options);
  }
  if (!answer.ok) {
    const text = await answer.text();
    throw new Error(messageOf(text) || `the server answers ${answer.status}`);
  }
  return answer;
}

export async function order(body) {
  const options = { method: "POST", headers: { "content-type": "application/json" } };
  return (await ask("/api/pictures", { ...options, body: JSON.stringify(body) })).json();
}

export function cancel(id) {
  return ask(`/api/pictures/${id}`, { method: "DELETE" });
}

// Yields [name, content] of each event of an order until it ends.
export async function* events(id) {
  const answer = await ask(`/api/pictures/${id}/events`);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [first, second] = block.split("\n");
      if (first.startsWith("event: ")) {
        yield [first.slice(7), JSON.parse(second.slice(6))];
      }
    }
  }
}

function messageOf(text) {
  try {
    return JSON.parse(text).error.message;
  } catch {
    return "";
  }
}

function askForToken() {
  const dialog = document.getElementById("ask");
  const field = document.getElementById("token");
  field.value = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, field.value.trim());
      resolve();
    }, { once: true });
  });
}
