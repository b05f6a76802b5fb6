// How the pool is drawn: colour says whose a square is, texture what of it is used.

const dark = matchMedia("(prefers-color-scheme: dark)");
const PATTERNED = ["shared", "internal", "external", "cached"];
const MAX_IN_DETAIL = 256; // squares that are drawn with their number and every slot

// Colours of equal lightness (OKLCH, of Björn Ottosson) to sRGB: alike in grey, apart in hue.
function oklch(lightness, chroma, hue) {
  const a = chroma * Math.cos((hue * Math.PI) / 180);
  const b = chroma * Math.sin((hue * Math.PI) / 180);
  const l = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (lightness - 0.0894841775 * a - 1.291485548 * b) ** 3;
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return linear.map((x) => {
    const y = Math.min(Math.max(x, 0), 1);
    return Math.round(255 * (y <= 0.0031308 ? 12.92 * y : 1.055 * y ** (1 / 2.4) - 0.055));
  });
}

const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

// All of them, as pixels; made again when light turns to dark.
let pixels = null;
function pixelOf(look, request) {
  pixels ??= LOOKS.map((_, number) => Uint32Array.from({ length: data.requests.length + 1 }, (_, each) => {
    const [red, green, blue] = colorOf(number, each);
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  }));
  return pixels[look][request];
}

function colorOf(look, request) {
  const hue = (request * 137.508 + 250) % 360;
  const nuance = [0, 0.05, -0.05][request % 3];
  switch (LOOKS[look]) {
    case "live": return oklch(0.66 + nuance, 0.13, hue);
    case "reserved": return dark.matches ? oklch(0.4, 0.06, hue) : oklch(0.9, 0.055, hue);
    case "internal": return dark.matches ? oklch(0.26, 0.025, hue) : oklch(0.965, 0.02, hue);
    case "shared": return dark.matches ? [238, 242, 247] : [26, 37, 74];
    case "external": return dark.matches ? [42, 36, 16] : [253, 246, 222];
    case "cached": return dark.matches ? [14, 48, 39] : [224, 244, 235];
    default: return dark.matches ? [16, 21, 27] : [255, 255, 255];
  }
}

const INKS = {
  shared: ["#ffffff", "#1a254a"], internal: ["#c4500f", "#ff9a5c"],
  external: ["#7a5f10", "#d9b44a"], cached: ["#00795a", "#3cc49a"],
};

// Textures go on from square to square, so that they show at any size of these.
function texture(context, name, ratio) {
  const size = Math.round((name === "internal" ? 7 : 6) * ratio);
  const tile = Object.assign(document.createElement("canvas"), { width: size, height: size });
  const pen = tile.getContext("2d");
  pen.strokeStyle = pen.fillStyle = INKS[name][Number(dark.matches)];
  pen.lineWidth = (name === "internal" ? 1.9 : 0.8) * ratio;
  pen.beginPath();
  if (name === "internal" || name === "cached") {
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift - 1, size + 1);
      pen.lineTo(shift + size + 1, -1);
    }
  }
  if (name === "cached") {
    for (const shift of [-size, 0, size]) {
      pen.moveTo(shift - 1, -1);
      pen.lineTo(shift + size + 1, size + 1);
    }
  }
  pen.stroke();
  if (name === "shared" || name === "external") {
    const radius = (name === "shared" ? 1.25 : 0.95) * ratio;
    for (const at of [0.25, 0.75]) {
      pen.beginPath();
      pen.arc(at * size, at * size, radius, 0, 7);
      pen.fill();
    }
  }
  return context.createPattern(tile, "repeat");
}

function fillWith(context, name, color, ratio, x, y, width, height) {
  context.fillStyle = css(color);
  context.fillRect(x, y, width, height);
  if (PATTERNED.includes(name)) {
    context.fillStyle = texture(context, name, ratio);
    context.fillRect(x, y, width, height);
  }
}

class PoolMap {
  constructor(film, canvas) {
    this.film = film;
    this.canvas = canvas;
    this.small = document.createElement("canvas");
    this.layer = document.createElement("canvas");
  }

  get inDetail() {
    return this.film.numSquares <= MAX_IN_DETAIL;
  }

  fit() {
    const ratio = (this.ratio = window.devicePixelRatio || 1);
    const column = parseFloat(getComputedStyle(this.canvas.parentElement).gridTemplateColumns);
    const width = Math.floor(column * ratio) - 2;
    const num = this.film.numSquares;
    if (this.inDetail) {
      const wanted = num <= 16 ? 4 : num <= 64 ? 8 : 16;
      this.columns = Math.max(1, Math.min(wanted, Math.floor(width / (76 * ratio))));
      this.width = Math.floor(width / this.columns);
      this.height = Math.round(54 * ratio);
    } else {
      // Wide ones are alone, or under each other as on a phone.
      const tall = width / ratio > 600 ? 0.45 : width / ratio > 330 ? 0.75 : 2.1;
      let side = Math.max(1, Math.floor(Math.sqrt((width * width * tall) / num)));
      while (side > 1 && Math.floor(width / side) * Math.floor((width * tall) / side) < num) side--;
      this.width = this.height = side;
      this.columns = Math.floor(width / side);
    }
    this.rows = Math.ceil(num / this.columns);
    this.canvas.width = this.columns * this.width;
    this.canvas.height = this.rows * this.height;
    this.canvas.style.width = `${this.canvas.width / ratio + 2}px`;
    this.small.width = this.columns;
    this.small.height = this.rows;
    this.layer.width = this.canvas.width;
    this.layer.height = this.canvas.height;
    const context = this.canvas.getContext("2d");
    this.textures = Object.fromEntries(PATTERNED.map((name) => [name, texture(context, name, ratio)]));
  }

  squareAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const scale = this.canvas.width / (box.width - 2);
    const column = Math.floor(((event.clientX - box.left - 1) * scale) / this.width);
    const row = Math.floor(((event.clientY - box.top - 1) * scale) / this.height);
    const square = row * this.columns + column;
    const inside = column >= 0 && column < this.columns && row >= 0 && square < this.film.numSquares;
    return inside ? square : null;
  }

  request(square) {
    const owner = this.film.squareOwner[square];
    return owner === NOBODY ? 0 : this.film.tenancies[owner].request;
  }

  draw(followed) {
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (this.inDetail) this.drawDetail(context);
    else this.drawSquares(context);
    if (followed !== null) this.outline(context, followed);
  }

  drawSquares(context) {
    const { film } = this;
    const { squareLook } = film;
    this.paint(context, (square) => pixelOf(squareLook[square], this.request(square)));
    for (const name of PATTERNED) {
      const look = LOOK[name];
      if (!film.squareLook.includes(look)) continue;
      const layer = this.layer.getContext("2d");
      layer.globalCompositeOperation = "copy";
      this.paint(layer, (square) => (squareLook[square] === look ? 0xff000000 : 0));
      layer.globalCompositeOperation = "source-in";
      layer.fillStyle = this.textures[name];
      layer.fillRect(0, 0, this.layer.width, this.layer.height);
      context.drawImage(this.layer, 0, 0);
    }
    if (film.reservations) this.markStarts(context);
  }

  // One pixel a square, scaled without smoothing: fast enough for any pool.
  paint(context, color) {
    const pen = this.small.getContext("2d");
    const image = pen.createImageData(this.columns, this.rows);
    const all = new Uint32Array(image.data.buffer);
    for (let square = 0; square < this.film.numSquares; square++) all[square] = color(square);
    pen.putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.small, 0, 0, this.canvas.width, this.canvas.height);
  }

  // Where a reservation begins.
  markStarts(context) {
    context.fillStyle = getComputedStyle(document.body).color;
    for (const number of this.film.present[this.film.frame]) {
      const square = this.film.square[this.film.tenancies[number].runs[0]];
      const [x, y] = [(square % this.columns) * this.width, Math.floor(square / this.columns) * this.height];
      context.fillRect(x, y, Math.max(1.5 * this.ratio, 1), this.height);
    }
  }

  drawDetail(context) {
    const { film, width, height, ratio } = this;
    const style = getComputedStyle(document.body);
    for (let square = 0; square < film.numSquares; square++) {
      const x = (square % this.columns) * width + 2 * ratio;
      const y = Math.floor(square / this.columns) * height + 2 * ratio;
      const [w, h] = [width - 4 * ratio, height - 4 * ratio];
      this.drawSlots(context, square, x, y + 17 * ratio, w, h - 17 * ratio);
      context.strokeStyle = style.color;
      context.lineWidth = ratio;
      context.strokeRect(x, y, w, h);
      const place = film.placeIn(square);
      const owner = film.owner[place];
      context.fillStyle = style.color;
      context.textBaseline = "middle";
      context.font = `600 ${12 * ratio}px ${style.fontFamily}`;
      context.textAlign = "left";
      const number = String(place + film.first);
      context.fillText(number, x + 4 * ratio, y + 9 * ratio);
      if (owner === NOBODY) continue;
      const room = w - context.measureText(number).width - 14 * ratio;
      context.font = `${11 * ratio}px ${style.fontFamily}`;
      context.textAlign = "right";
      const name = data.requests[film.tenancies[owner].request];
      const [who, which] = film.holders[place] > 1 ? [`${film.holders[place]} share`, ""] : [name, ` [${film.order[place]}]`];
      let shown = who + which;
      for (let length = Math.min(who.length, 40); length && context.measureText(shown).width > room; length--) {
        shown = `${who.slice(0, length - 1)}…${which}`;
      }
      context.fillText(shown, x + w - 4 * ratio, y + 9 * ratio);
    }
  }

  drawSlots(context, square, x, y, width, height) {
    const order = ["shared", "live", "reserved", "internal", "external", "cached", "free"];
    const slot = width / data.grain;
    let at = 0;
    for (const name of order) {
      const count = this.film.sums[name][square];
      if (!count) continue;
      const color = colorOf(LOOK[name], this.request(square));
      fillWith(context, name, color, this.ratio, x + at * slot, y, count * slot, height);
      at += count;
    }
    context.strokeStyle = dark.matches ? "#ffffff30" : "#00000022";
    context.lineWidth = Math.max(1, this.ratio / 2);
    for (let line = 0; slot >= 3 && line < data.grain; line++) context.strokeRect(x + line * slot, y, slot, height);
  }

  // All that a request holds stands out, by outline and not by colour.
  outline(context, followed) {
    const number = this.film.holding(followed);
    const mine = new Set(number === undefined ? [] : this.film.table(number).map((place) => this.film.square[place]));
    const paper = getComputedStyle(document.body).backgroundColor;
    context.save();
    context.globalAlpha = 0.62;
    context.fillStyle = paper;
    for (let square = 0; square < this.film.numSquares; square++) {
      if (!mine.has(square)) context.fillRect(...this.box(square));
    }
    context.restore();
    context.fillStyle = getComputedStyle(document.body).color;
    const line = Math.max(1, Math.min(Math.round(2 * this.ratio), Math.floor(this.width / 4)));
    for (const square of mine) {
      const [x, y, w, h] = this.box(square);
      const column = square % this.columns;
      if (!mine.has(square - 1) || !column) context.fillRect(x, y, line, h);
      if (!mine.has(square + 1) || column === this.columns - 1) context.fillRect(x + w - line, y, line, h);
      if (!mine.has(square - this.columns)) context.fillRect(x, y, w, line);
      if (!mine.has(square + this.columns)) context.fillRect(x, y + h - line, w, line);
    }
  }

  box(square) {
    const [row, column] = [Math.floor(square / this.columns), square % this.columns];
    return [column * this.width, row * this.height, this.width, this.height];
  }
}
