// Figures of the reports: a row for each call, a dot for each library, and the same as a table.

for (const place of document.querySelectorAll(".figures")) {
  const data = JSON.parse(place.querySelector("script").textContent);
  const colours = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a5a00", "#6b6b6b", "#56b4e9", "#e69f00"];
  const off = new Set();

  const chooser = (label, names, changed) => {
    const select = document.createElement("select");
    select.append(...names.map((name) => new Option(name)));
    select.addEventListener("change", changed);
    const named = document.createElement("label");
    named.append(`${label} `, select);
    place.append(named);
    return select;
  };
  const refill = () => {
    const last = group.value;
    group.replaceChildren(...Object.keys(data[machine.value]).map((name) => new Option(name)));
    if (last in data[machine.value]) group.value = last;
    draw();
  };
  const machine = chooser("Machine", Object.keys(data), refill);
  const group = chooser("Figures", Object.keys(Object.values(data)[0]), () => draw());
  const drawn = document.createElement("div");
  place.append(drawn);

  const make = (name, attributes, ...inner) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...inner);
    return made;
  };
  const text = (x, y, content, anchor = "start") =>
    make("text", { x, y, "text-anchor": anchor, fill: "currentColor", "font-size": 12 }, content);

  function draw() {
    const { better, rows } = data[machine.value][group.value];
    const all = [...new Set(rows.flatMap(([, found]) => Object.keys(found)))];
    const shares = group.value.includes("(of the ");
    const shown = (x) => (shares ? `${(100 * x).toFixed(1)} %` : `${x}`);
    const seen = all.filter((name) => !off.has(name));
    const largest = Math.max(...rows.flatMap(([, found]) => seen.map((name) => found[name] ?? 0)), shares ? 1 : 0);
    const [left, width, step] = [270, 360, 20];
    const height = rows.length * step + 24;
    const at = (x) => left + (width * x) / (largest || 1);
    const svg = make("svg", { viewBox: `0 0 ${left + width + 20} ${height}`, role: "img" });
    svg.setAttribute("aria-label", `${group.value}, ${machine.value}; the table below has the same figures`);
    for (const part of [0, 0.5, 1]) {
      const x = at(part * largest);
      svg.append(make("line", { x1: x, x2: x, y1: 0, y2: height - 18, stroke: "currentColor", opacity: 0.2 }));
      svg.append(text(x, height - 4, shown(Number((part * largest).toPrecision(3))), "middle"));
    }
    rows.forEach(([name, found], number) => {
      const y = number * step + 12;
      svg.append(text(left - 8, y + 4, name, "end"));
      for (const library of seen.filter((x) => x in found).reverse()) {
        const dot = { cx: at(found[library]), cy: y, r: library === "regard" ? 6 : 4, fill: colours[all.indexOf(library) % 8] };
        svg.append(make("circle", dot, make("title", {}, `${library}: ${shown(found[library])}`)));
      }
    });

    const legend = document.createElement("p");
    for (const name of all) {
      const box = Object.assign(document.createElement("input"), { type: "checkbox", checked: !off.has(name) });
      box.addEventListener("change", () => {
        if (box.checked) off.delete(name);
        else off.add(name);
        draw();
        [...drawn.querySelectorAll("input")][all.indexOf(name)].focus();
      });
      const label = document.createElement("label");
      const mark = Object.assign(document.createElement("span"), { textContent: "● " });
      mark.style.color = colours[all.indexOf(name) % 8];
      mark.setAttribute("aria-hidden", "true");
      label.append(box, mark, name);
      legend.append(label);
    }
    const table = document.createElement("table");
    table.className = "docutils";
    const head = table.createTHead().insertRow();
    for (const name of [`${better} is better`, ...seen]) {
      head.append(Object.assign(document.createElement("th"), { textContent: name, scope: "col" }));
    }
    const body = table.createTBody();
    for (const [name, found] of rows) {
      const line = body.insertRow();
      for (const cell of [name, ...seen.map((x) => (x in found ? shown(found[x]) : "–"))]) line.insertCell().textContent = cell;
    }
    const scroll = document.createElement("div");
    scroll.className = "table-wrapper";
    scroll.tabIndex = 0;
    scroll.append(table);
    drawn.replaceChildren(legend, svg, scroll);
  }
  draw();
}
