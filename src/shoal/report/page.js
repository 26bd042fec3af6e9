"use strict";
// Read-outs under the pointer. The page is complete without them.
const tip = document.getElementById("tip");

function show(event, nodes) {
  tip.replaceChildren(...nodes);
  tip.hidden = false;
  const right = document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = Math.max(8, Math.min(event.pageX + 14, window.scrollX + right)) + "px";
  tip.style.top = event.pageY + 16 + "px";
}

function nearest(marks, share) {
  let low = 0, high = marks.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((marks[middle][0] + marks[middle + 1][0]) / 2 < share) low = middle + 1;
    else high = middle;
  }
  return marks[low];
}

function rows(data, mark) {
  const nodes = [document.createTextNode(mark[1])];
  mark[2].forEach((text, index) => {
    if (text === null) return;
    const key = document.createElement("i");
    key.className = "key " + data.css[index];
    nodes.push(document.createElement("br"), key, `${data.names[index]}  ${text}`);
  });
  return nodes;
}

for (const figure of document.querySelectorAll(".chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const plot = figure.querySelector(".plot");
  const cursor = document.createElement("div");
  cursor.className = "cursor";
  cursor.hidden = true;
  plot.append(cursor);
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const mark = nearest(data.marks, (event.clientX - box.left) / box.width);
    if (!mark) return;
    cursor.hidden = false;
    cursor.style.left = mark[0] * 100 + "%";
    show(event, rows(data, mark));
  });
  plot.addEventListener("pointerleave", () => { cursor.hidden = tip.hidden = true; });
}

for (const spans of document.querySelectorAll(".spans")) {
  const tell = (event) => {
    const said = event.target.dataset.said;
    if (said) show(event, [said]);
    else tip.hidden = true;
  };
  spans.addEventListener("pointermove", tell);
  spans.addEventListener("pointerdown", tell);
  // A finger leaves as soon as it is lifted: what it asked for stays until the next tap.
  spans.addEventListener("pointerleave", (event) => {
    if (event.pointerType !== "touch") tip.hidden = true;
  });
}
// Keys: left and right along a lane, up and down to what runs at the same time in the next one.
for (const spans of document.querySelectorAll(".spans")) {
  const place = (bar) => ({
    x: Number(bar.getAttribute("x")),
    y: Number(bar.getAttribute("y")),
  });
  const bars = [...spans.querySelectorAll("rect")].map((bar) => ({ bar, ...place(bar) }));
  const closest = (found, from) => found.reduce((best, one) =>
    !best || Math.abs(one.x - from.x) < Math.abs(best.x - from.x) ? one : best, null);
  let here = null;
  const steps = {
    ArrowRight: () => closest(bars.filter((one) => one.y === here.y && one.x > here.x), here),
    ArrowLeft: () => closest(bars.filter((one) => one.y === here.y && one.x < here.x), here),
    ArrowDown: () => across((y) => y > here.y, Math.min),
    ArrowUp: () => across((y) => y < here.y, Math.max),
    Home: () => bars.reduce((a, b) => (b.x < a.x ? b : a)),
    End: () => bars.reduce((a, b) => (b.x > a.x ? b : a)),
  };
  function across(isBeyond, nearer) {
    const beyond = bars.filter((one) => isBeyond(one.y));
    if (!beyond.length) return null;
    const y = nearer(...beyond.map((one) => one.y));
    return closest(beyond.filter((one) => one.y === y), here);
  }
  function go(next) {
    here?.bar.classList.remove("here");
    here = next;
    here.bar.classList.add("here");
    const box = here.bar.getBoundingClientRect();
    show({ pageX: box.left + window.scrollX, pageY: box.bottom + window.scrollY }, [
      here.bar.dataset.said,
    ]);
  }
  spans.addEventListener("keydown", (event) => {
    if (event.key === "Escape") tip.hidden = true;
    if (!(event.key in steps) || !bars.length) return;
    event.preventDefault();
    const next = here ? steps[event.key]() : bars[0];
    if (next) go(next);
  });
  spans.addEventListener("blur", () => {
    here?.bar.classList.remove("here");
    here = null;
    tip.hidden = true;
  });
}
document.addEventListener("pointerdown", () => { tip.hidden = true; }, true);
