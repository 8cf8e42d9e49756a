// Asks the server. A token is asked for once, and kept for this visit.

const KEY = "strop-token";

const GONE = "The server does not answer. Look whether it runs, then try again.";

export async function ask(path, options = {}) {
  const token = sessionStorage.getItem(KEY);
  const headers = { ...options.headers };
  if (token) headers.authorization = `Bearer ${token}`;
  const answer = await fetch(path, { ...options, headers }).catch(() => { throw new Error(GONE); });
  if (answer.status === 401) {
    await askForToken(Boolean(token));
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
  let isOver = false;
  for (;;) {
    const { value, done } = await reader.read().catch(() => { throw new Error(GONE); });
    if (done && isOver) return;
    if (done) throw new Error(GONE);
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const [first, second] = block.split("\n");
      if (first.startsWith("event: ")) {
        isOver = first === "event: end";
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

// Whoever closes the question without a token is asked again by the next request.
function askForToken(wasWrong) {
  const dialog = document.getElementById("ask");
  const field = document.getElementById("token");
  field.value = "";
  document.getElementById("token-wrong").textContent = wasWrong ? "That was not the token." : "";
  dialog.returnValue = "";
  if (!dialog.open) dialog.showModal();
  return new Promise((resolve, reject) => {
    dialog.addEventListener("close", () => {
      sessionStorage.setItem(KEY, field.value.trim());
      if (dialog.returnValue === "given") resolve();
      else reject(new Error("This server asks for a token: the next request asks for it again."));
    }, { once: true });
  });
}
