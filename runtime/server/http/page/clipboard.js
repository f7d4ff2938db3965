// Copies text. Over plain http there is no navigator.clipboard: there a selection is copied.

import { announce, make } from "./dom.js";
import { notifyError } from "./notice.js";

/** Copies a text and shows on the button that it did. `source`: the element that has the text, if it is shown. */
export async function copy(text, pressed, source = null) {
  if (!(await copied(text))) {
    if (source) getSelection().selectAllChildren(source);
    notifyError(source ? "The browser doesn't let this page copy: the text is selected, press Ctrl+C." : "The browser doesn't let this page copy: select the text and press Ctrl+C.");
    return;
  }
  announce("Copied.");
  const label = pressed.textContent;
  if (label === "Copied") return;
  pressed.textContent = "Copied";
  setTimeout(() => { pressed.textContent = label; }, 1500);
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text); // a TypeError over plain http
    return true;
  } catch {
    return copiedBySelection(text);
  }
}

function copiedBySelection(text) {
  const focused = document.activeElement, field = make("textarea", { value: text, className: "unseen", readOnly: true });
  const host = document.querySelector("dialog[open]") ?? document.body;
  host.append(field);
  field.select();
  try {
    return document.execCommand("copy");
  } catch {
    return false;
  } finally {
    field.remove();
    focused?.focus({ preventScroll: true });
  }
}
