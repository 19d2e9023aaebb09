// Makes elements. Texts only ever become text nodes: nothing here, or anywhere on this page, parses markup.

export function el(tag, given = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given)) {
    if (name === "on") for (const [event, what] of Object.entries(value)) made.addEventListener(event, what);
    else if (name === "class") made.className = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    made.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return made;
}

export function fill(where, ...children) {
  where.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (child instanceof Node ? child : document.createTextNode(String(child)))));
}

export function text(where, words) {
  if (where.textContent !== words) where.textContent = words;
}

// Rows of a table that keep their elements, so that focus and what is selected stay while figures change.
export function keepRows(body, rows, keyOf, make, update) {
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let place = null;
  for (const row of rows) {
    const key = String(keyOf(row));
    let shown = known.get(key);
    if (shown) known.delete(key);
    else { shown = make(row); shown.dataset.key = key; }
    update(shown, row);
    const next = place ? place.nextSibling : body.firstChild;
    if (next !== shown) body.insertBefore(shown, next);
    place = shown;
  }
  for (const gone of known.values()) gone.remove();
}
