"use strict";
// The frames, decoded: what each place and each square of a pool is at one of them.

const data = JSON.parse(document.getElementById("data").textContent);
const SLOT_STATES = ["live", "reserved", "internal", "external", "cached", "free"];
// Of two that fill a square equally, the first is shown.
const LOOKS = ["internal", "external", "reserved", "shared", "live", "cached", "free"];
const LOOK = Object.fromEntries(LOOKS.map((name, number) => [name, number]));
const NOBODY = -1;

function summed(changes) {
  const totals = new Int32Array(changes.length);
  let total = 0;
  for (let at = 0; at < totals.length; at++) totals[at] = total += changes[at];
  return totals;
}

class Film {
  constructor(run) {
    Object.assign(this, run);
    this.tenancies = run.tenancies.map(([request, final, first, held, computed, runs]) => ({
      request, final, first, held: summed(held), computed: summed(computed), runs,
    }));
    this.present = data.times.map(() => []);
    this.tenancies.forEach((tenancy, number) => {
      for (let at = 0; at < tenancy.held.length; at++) this.present[tenancy.first + at].push(number);
    });
    this.capacity = this.places * this.unit;
    this.numSquares = Math.ceil(this.capacity / data.grain);
    this.owner = new Int32Array(this.places);
    this.order = new Int32Array(this.places);
    this.holders = new Uint16Array(this.places);
    this.isCached = new Uint8Array(this.places);
    this.cachedOf = -1; // the frame that isCached is of
    this.votes = new Int32Array(this.numSquares);
    this.square = new Int32Array(this.places);
    for (let place = 0; place < this.places; place++) {
      this.square[place] = Math.floor((place * this.unit) / data.grain);
    }
    this.sums = Object.fromEntries(LOOKS.map((name) => [name, new Int32Array(this.numSquares)]));
    this.squareOwner = new Int32Array(this.numSquares);
    this.squareLook = new Uint8Array(this.numSquares);
    this.hasCache = run.changes.some((runs) => runs.length > 0);
    this.frame = -1;
  }

  // Take in what every place is at a frame.
  seek(frame) {
    if (frame === this.frame) return;
    this.frame = frame;
    this.owner.fill(NOBODY);
    this.holders.fill(0);
    for (const name of LOOKS) this.sums[name].fill(0);
    this.squareOwner.fill(NOBODY);
    this.votes.fill(0);
    this.isShared = false;
    for (const number of this.present[frame]) {
      if (this.reservations) this.enterExtent(number);
      else this.enter(number);
    }
    this.shareOf = this.isShared ? this.countShared() : 0;
    if (this.hasCache) this.enterCached(frame);
    const unusable = this.unusable[frame];
    for (let at = 0; at < unusable.length; at += 2) {
      this.spread("external", unusable[at] * this.unit, unusable[at + 1] * this.unit);
    }
    this.judge();
  }

  // A reservation: one piece, of which the first slots are written and the last never will be.
  enterExtent(number) {
    const { final, first, computed, runs } = this.tenancies[number];
    const [start, , size] = runs;
    const live = computed[this.frame - first];
    const written = Math.min(Math.max(final, live), size);
    this.owner.fill(number, start, start + size);
    this.spread("live", start, live);
    this.spread("reserved", start + live, written - live);
    this.spread("internal", start + written, size - written);
    for (let square = this.square[start]; square <= this.square[start + size - 1]; square++) {
      const from = Math.max(start, square * data.grain);
      const here = Math.min(start + size, (square + 1) * data.grain) - from;
      if (here > this.votes[square]) {
        this.squareOwner[square] = number;
        this.votes[square] = here;
      }
    }
  }

  enter(number) {
    const { final, first, held, computed, runs } = this.tenancies[number];
    const numHeld = held[this.frame - first];
    const numComputed = computed[this.frame - first];
    const { unit, owner, order, holders, square: squares, squareOwner, votes } = this;
    const { live: lives, reserved, internal: internals } = this.sums;
    let k = 0;
    for (let at = 0; at < runs.length && k < numHeld; at += 3) {
      const step = runs[at + 1];
      const count = Math.min(runs[at + 2], numHeld - k);
      for (let place = runs[at], i = 0; i < count; i++, place += step, k++) {
        holders[place]++;
        if (holders[place] > 1) {
          this.isShared = true; // a full block, live already
          continue;
        }
        owner[place] = number;
        order[place] = k;
        const square = squares[place];
        const start = k * unit;
        const live = Math.min(Math.max(numComputed - start, 0), unit);
        const internal = Math.min(Math.max(start + unit - Math.max(final, start), 0), unit - live);
        lives[square] += live;
        internals[square] += internal;
        reserved[square] += unit - live - internal;
        if (squareOwner[square] === number) votes[square]++;
        else if (--votes[square] < 0) {
          squareOwner[square] = number;
          votes[square] = 1;
        }
      }
    }
  }

  countShared() {
    let total = 0;
    for (let place = 0; place < this.places; place++) {
      if (this.holders[place] < 2) continue;
      const square = this.square[place];
      this.sums.shared[square] += this.unit;
      this.sums.live[square] -= this.unit;
      total += this.unit;
    }
    return total;
  }

  enterCached(frame) {
    // What changed sides twice is where it was: forwards and backwards are alike.
    const [low, high] = [Math.min(frame, this.cachedOf), Math.max(frame, this.cachedOf)];
    for (let at = low + 1; at <= high; at++) {
      let place = 0;
      const runs = this.changes[at];
      for (let i = 0; i < runs.length; i += 2) {
        place += runs[i];
        for (let end = place + runs[i + 1]; place < end; place++) this.isCached[place] ^= 1;
      }
    }
    this.cachedOf = frame;
    for (let place = 0; place < this.places; place++) {
      if (this.isCached[place]) this.sums.cached[this.square[place]] += this.unit;
    }
  }

  spread(name, slot, length) {
    for (const end = slot + length; slot < end;) {
      const square = Math.floor(slot / data.grain);
      const next = Math.min(end, (square + 1) * data.grain);
      this.sums[name][square] += next - slot;
      slot = next;
    }
  }

  judge() {
    const all = LOOKS.map((name) => this.sums[name]);
    for (let square = 0; square < this.numSquares; square++) {
      const size = Math.min(data.grain, this.capacity - square * data.grain);
      let rest = size;
      let best = 0;
      for (let look = 0; look < LOOK.free; look++) {
        rest -= all[look][square];
        if (all[look][square] > all[best][square]) best = look;
      }
      all[LOOK.free][square] = rest;
      this.squareLook[square] = rest > all[best][square] ? LOOK.free : best;
    }
  }

  // Of a tenancy that is present: its places in token order.
  table(number) {
    const { first, held, runs } = this.tenancies[number];
    const places = [];
    const count = held[this.frame - first];
    for (let at = 0; at < runs.length; at += 3) {
      for (let i = 0; i < runs[at + 2] && places.length < count; i++) {
        places.push(runs[at] + i * runs[at + 1]);
      }
    }
    return places;
  }

  computed(number) {
    const tenancy = this.tenancies[number];
    return tenancy.computed[this.frame - tenancy.first];
  }

  holdersOf(place) {
    return this.present[this.frame].filter((number) => this.table(number).includes(place));
  }

  holding(request) {
    return this.present[this.frame].find((number) => this.tenancies[number].request === request);
  }

  // What a square shows of most interest: a place that somebody holds, else its first.
  placeIn(square) {
    const start = Math.floor((square * data.grain) / this.unit);
    const end = Math.min(this.places, Math.ceil(((square + 1) * data.grain) / this.unit));
    for (let place = start; place < end; place++) {
      if (this.owner[place] !== NOBODY && this.owner[place] === this.squareOwner[square]) return place;
    }
    return start;
  }

  ended(frame) {
    return data.times[frame] >= this.end;
  }

  share(name, frame) {
    return (100 * this[name][frame]) / this.capacity;
  }

  wasted(frame) {
    return this.share("internal", frame) + this.share("external", frame);
  }
}
