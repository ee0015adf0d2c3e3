"""The chunked forms one multiply-add at a time, counted by what they are for."""

import math

import torch

from linattn_edu.reference.delta import gate_cumsum, kda_intra, solve, state, wy


class Scalars:
    """The forward pass."""

    def __init__(self):
        self.count = dict.fromkeys(("kkt", "qkt", "inverse", "state", "w", "lower"), 0)

    def dot(self, what, xs, ys):
        self.count[what] += len(xs)
        return sum(x * y for x, y in zip(xs, ys, strict=True))

    def pairs(self, q, k):
        """K K^T below the diagonal and Q K^T up to it, of one q/k head."""
        n = range(len(k))
        kk = {(i, j): self.dot("kkt", k[i], k[j]) for i in n for j in range(i)}
        qk = {(i, j): self.dot("qkt", q[i], k[j]) for i in n for j in range(i + 1)}
        return kk, qk

    def chunk(self, q, k, v, g, beta, S, kk, qk):
        """Outputs of one chunk of one value head; S[d][e] is updated."""
        n, K, V, s = len(v), len(S), len(S[0]), len(S) ** -0.5
        gc = [sum(g[: i + 1]) for i in range(n)]
        L = {key: beta[key[0]] * x for key, x in kk.items()}
        X = {(i, i): 1.0 for i in range(n)}
        for i in range(n):
            for m in range(i):
                between = range(m + 1, i)
                inner = [L[i, j] for j in between], [X[j, m] for j in between]
                X[i, m] = -L[i, m] - self.dot("inverse", *inner)
        for i in range(n):  # w of the five stages, not needed here
            for d in range(K):
                self.dot("w", [X[i, j] for j in range(i + 1)], [k[j][d] for j in range(i + 1)])
        column = [[S[d][e] for d in range(K)] for e in range(V)]
        W = [
            [v[i][e] - math.exp(gc[i]) * self.dot("state", k[i], column[e]) for e in range(V)]
            for i in range(n)
        ]
        R = {(i, j): x * math.exp(gc[i] - gc[j]) * beta[j] for (i, j), x in X.items()}
        P = {(i, j): s * x * math.exp(gc[i] - gc[j]) for (i, j), x in qk.items()}
        new = [[self.lower(R, W, i, e) for e in range(V)] for i in range(n)]
        o = [
            [
                s * math.exp(gc[i]) * self.dot("state", q[i], column[e]) + self.lower(P, new, i, e)
                for e in range(V)
            ]
            for i in range(n)
        ]
        for d in range(K):
            for e in range(V):
                rows = [math.exp(gc[-1] - gc[i]) * new[i][e] for i in range(n)]
                written = self.dot("state", [k[i][d] for i in range(n)], rows)
                S[d][e] = math.exp(gc[-1]) * S[d][e] + written
        return o

    def lower(self, M, x, i, e):
        return self.dot("lower", [M[i, j] for j in range(i + 1)], [x[j][e] for j in range(i + 1)])


class Adjoints:
    """The backward pass of all heads; what it needs of the forward pass is computed by stages."""

    def __init__(self, i, do, chunk_size):
        self.count = dict.fromkeys(("output_bwd", "state_bwd", "wy_bwd"), 0)
        self.i, self.do, self.C = i, do, chunk_size
        self.dq, self.dk, self.dv = (torch.zeros_like(x) for x in (i.q, i.k, i.v))
        self.dg, self.dbeta = torch.zeros_like(i.g), torch.zeros_like(i.beta)
        options = {"chunk_size": chunk_size}
        self.gc = gate_cumsum.gate_cumsum(i.g, **options)
        self.A = solve.solve(i.k, i.beta, **options)
        self.w, u = wy.wy(i.k, i.v, i.beta, self.gc, self.A)
        self.h, self.v_new, _ = state.state(i.k, self.w, u, self.gc, **options)

    def dot(self, what, xs, ys):
        xs, ys = list(xs), list(ys)
        self.count[what] += len(xs)
        return sum(x * y for x, y in zip(xs, ys, strict=True))

    def run(self):
        (B, T, H, K), (HV, V) = self.i.q.shape, self.i.v.shape[2:]
        for b in range(B):
            dS = [[[0.0] * V for _ in range(K)] for _ in range(HV)]
            for first in reversed(range(0, T, self.C)):
                rows = slice(first, min(first + self.C, T))
                for h in range(H):
                    self.chunk(b, rows, h, HV // H, dS)

    def chunk(self, b, rows, h, group, dS):
        q, k = (x[b, rows, h].tolist() for x in (self.i.q, self.i.k))
        n, K, s = range(len(k)), len(k[0]), len(k[0]) ** -0.5
        lower = [(i, j) for i in n for j in range(i + 1)]
        qk = {(i, j): self.dot("output_bwd", q[i], k[j]) for i, j in lower}
        kk = {(i, j): self.dot("wy_bwd", k[i], k[j]) for i, j in lower if i > j}
        dM, N = dict.fromkeys(lower, 0.0), dict.fromkeys(kk, 0.0)  # sums over the value heads
        for head in range(h * group, (h + 1) * group):
            self.head(b, rows, head, q, k, qk, kk, dS[head], dM, N, s)
        out = "output_bwd"
        for i in n:
            before, after = range(i + 1), range(i, len(k))
            for d in range(K):
                dq = self.dot(out, (dM[i, j] for j in before), (k[j][d] for j in before))
                dk = self.dot(out, (dM[j, i] for j in after), (q[j][d] for j in after))
                dk += self.dot("wy_bwd", (N[i, j] for j in range(i)), (k[j][d] for j in range(i)))
                later = after[1:]
                dk += self.dot("wy_bwd", (N[j, i] for j in later), (k[j][d] for j in later))
                self.dq[b, rows.start + i, h, d] += dq
                self.dk[b, rows.start + i, h, d] += dk

    def head(self, b, rows, head, q, k, qk, kk, dS, dM, N, s):
        """One value head of a chunk: dS[d][e] is updated, dM and N are added to."""
        h = head // (self.i.v.shape[2] // self.i.q.shape[2])
        v, v_new, do, w, A, beta, gc = (
            x[b, rows, head].tolist()
            for x in (self.i.v, self.v_new, self.do, self.w, self.A, self.i.beta, self.gc)
        )
        S = self.h[b, rows.start // self.C, head].tolist()
        n, K, V = range(len(v)), len(S), len(S[0])
        lower = [(i, j) for i in n for j in range(i + 1)]
        G = {(i, j): 2 ** (gc[i] - gc[j]) for i, j in lower}
        e, fade = [2**x for x in gc], [2 ** (gc[-1] - x) for x in gc]
        dgc = [0.0 for _ in n]

        def column(x, j):
            return [row[j] for row in x]

        # output_bwd
        inter = [[s * e[i] * self.dot("output_bwd", do[i], S[d]) for d in range(K)] for i in n]
        own = {(i, j): s * self.dot("output_bwd", do[i], v_new[j]) * G[i, j] for i, j in lower}
        P = {key: s * qk[key] * G[key] for key in lower}
        dv = [
            [
                self.dot(
                    "output_bwd",
                    (P[i, j] for i in range(j, len(v))),
                    (do[i][c] for i in range(j, len(v))),
                )
                for c in range(V)
            ]
            for j in n
        ]
        for i, j in lower:
            dM[i, j] += own[i, j]
            dgc[i] += own[i, j] * qk[i, j]
            dgc[j] -= own[i, j] * qk[i, j]
        for i in n:
            dgc[i] += sum(x * y for x, y in zip(q[i], inter[i], strict=True))
            self.dq[b, rows.start + i, h] += torch.tensor(inter[i], dtype=self.dq.dtype)
        # state_bwd
        for i in n:
            for c in range(V):
                dv[i][c] += fade[i] * self.dot("state_bwd", k[i], column(dS, c))
        leaving = [list(row) for row in dS]
        for d in range(K):
            for c in range(V):
                decayed = [s * e[i] * do[i][c] for i in n]
                dS[d][c] = e[-1] * dS[d][c] + self.dot("state_bwd", column(q, d), decayed)
                dS[d][c] -= self.dot("state_bwd", column(w, d), column(dv, c))
        # wy_bwd
        own = "wy_bwd"
        through = [[fade[i] * self.dot(own, v_new[i], leaving[d]) for d in range(K)] for i in n]
        Z = [
            [
                self.dot(
                    own,
                    (A[i][j] * G[i, j] for i in range(j, len(v))),
                    (dv[i][c] for i in range(j, len(v))),
                )
                for c in range(V)
            ]
            for j in n
        ]
        read = [[-beta[i] * e[i] * self.dot(own, Z[i], S[d]) for d in range(K)] for i in n]
        dbeta = [0.0 for _ in n]
        for i, j in kk:
            dL = -self.dot(own, Z[i], v_new[j]) * G[i, j]
            N[i, j] += beta[i] * dL
            dbeta[i] += dL * kk[i, j]
            dgc[i] += beta[i] * dL * kk[i, j]
            dgc[j] -= beta[i] * dL * kk[i, j]
        for i in n:
            t = sum(x * y for x, y in zip(k[i], through[i], strict=True))
            dgc[-1] += t
            dgc[i] += sum(x * y for x, y in zip(k[i], read[i], strict=True)) - t
            held = [sum(k[i][d] * S[d][c] for d in range(K)) for c in range(V)]
            dbeta[i] += sum(Z[i][c] * (v[i][c] - e[i] * held[c]) for c in range(V))
        dgc[-1] += e[-1] * sum(leaving[d][c] * S[d][c] for d in range(K) for c in range(V))
        for i in n:
            t = rows.start + i
            for d in range(K):
                self.dk[b, t, h, d] += through[i][d] + read[i][d]
            for c in range(V):
                self.dv[b, t, head, c] = beta[i] * Z[i][c]
            self.dbeta[b, t, head] = dbeta[i]
            self.dg[b, t, head] = sum(dgc[i:])


class Channels:
    """Both passes with a gate for each channel; between stages as their references hand it on."""

    def __init__(self, i, do, chunk_size):
        self.i, self.do, self.C, self.count = i, do, chunk_size, {}
        self.o, self.dq, self.dk, self.dv = (torch.zeros_like(x) for x in (i.v, i.q, i.k, i.v))
        self.dg, self.dbeta = torch.zeros_like(i.g), torch.zeros_like(i.beta)
        options = {"chunk_size": chunk_size}
        self.gc = gate_cumsum.gate_cumsum(i.g, **options)
        self.P, self.A = kda_intra.kda_intra(i.q, i.k, i.beta, self.gc, **options)
        self.w, self.u, self.kg, self.qg = wy.wy(i.k, i.v, i.beta, self.gc, self.A, i.q)
        self.h, self.v_new, _ = state.state(self.kg, self.w, self.u, self.gc, **options)

    def dot(self, what, xs, ys):
        xs, ys = list(xs), list(ys)
        self.count[what] = self.count.get(what, 0) + len(xs)
        return sum(x * y for x, y in zip(xs, ys, strict=True))

    def run(self):
        B, T, HV, V = self.i.v.shape
        K = self.i.q.shape[-1]
        for b in range(B):
            for head in range(HV):
                dS = [[0.0] * V for _ in range(K)]
                for first in reversed(range(0, T, self.C)):
                    dS = self.chunk(b, slice(first, min(first + self.C, T)), head, dS)

    def chunk(self, b, rows, head, dS):
        """One chunk of one value head; the gradient of the state that enters it."""
        h = head // (self.i.v.shape[2] // self.i.q.shape[2])
        q, k = (x[b, rows, h].tolist() for x in (self.i.q, self.i.k))
        v, beta, gc, P, A, w, u, kg, qg, v_new, do = (
            x[b, rows, head].tolist()
            for x in (
                self.i.v, self.i.beta, self.gc, self.P, self.A, self.w, self.u, self.kg, self.qg,
                self.v_new, self.do,
            )
        )  # fmt: skip
        S = self.h[b, rows.start // self.C, head].tolist()
        n, ks, vs, s = range(len(v)), range(len(S)), range(len(S[0])), len(S) ** -0.5
        lower = [(i, j) for i in n for j in range(i + 1)]
        below = [(i, j) for i, j in lower if i > j]
        D = {(i, j): [2 ** (gc[i][d] - gc[j][d]) for d in ks] for i, j in lower}

        def column(x, c):
            return [row[c] for row in x]

        def gated(i, j, x):
            return [y * e for y, e in zip(x, D[i, j], strict=True)]

        # kda_intra, wy, state, output
        L = {(i, j): beta[i] * self.dot("kda_intra", k[i], gated(i, j, k[j])) for i, j in below}
        for i, j in lower:
            same(self.dot("kda_intra", q[i], gated(i, j, k[j])), P[i][j])
        for i, m in below:
            between = range(m + 1, i)
            inner = self.dot("kda_intra", (L[i, j] for j in between), (A[j][m] for j in between))
            same(-L[i, m] - inner, A[i][m])
        kb = [[beta[i] * 2 ** gc[i][d] * k[i][d] for d in ks] for i in n]
        for i in n:
            before = range(i + 1)
            for d in ks:
                same(self.dot("w", A[i][: i + 1], (kb[j][d] for j in before)), w[i][d])
            for c in vs:
                written = self.dot("u", A[i][: i + 1], (beta[j] * v[j][c] for j in before))
                same(written, u[i][c])
                same(u[i][c] - self.dot("state", w[i], column(S, c)), v_new[i][c])
                read = self.dot("output", qg[i], column(S, c))
                read += self.dot("output", P[i][: i + 1], column(v_new[: i + 1], c))
                self.o[b, rows.start + i, head, c] = s * read
        after = [
            [2 ** gc[-1][d] * S[d][c] + self.dot("state", column(kg, d), column(v_new, c))
             for c in vs] for d in ks
        ]  # fmt: skip
        if rows.stop < self.i.v.shape[1]:
            following = self.h[b, rows.start // self.C + 1, head]
            same(torch.tensor(after, dtype=following.dtype), following)

        # state_bwd, kda_output_bwd, kda_wy_bwd
        out, own = "kda_output_bwd", "kda_wy_bwd"
        dqg = [[s * self.dot(out, do[i], S[d]) for d in ks] for i in n]
        dP = {(i, j): s * self.dot(out, do[i], v_new[j]) for i, j in lower}
        dv = [
            [s * self.dot("state_bwd", (P[i][j] for i in n[j:]), (do[i][c] for i in n[j:]))
             + self.dot("state_bwd", kg[j], column(dS, c)) for c in vs] for j in n
        ]  # fmt: skip
        before = [
            [2 ** gc[-1][d] * dS[d][c] + s * self.dot("state_bwd", column(qg, d), column(do, c))
             - self.dot("state_bwd", column(w, d), column(dv, c)) for c in vs] for d in ks
        ]  # fmt: skip
        Z = [
            [self.dot(own, (A[i][j] for i in n[j:]), (dv[i][c] for i in n[j:])) for c in vs]
            for j in n
        ]
        dL = {(i, j): -self.dot(own, Z[i], v_new[j]) for i, j in below}
        dkb = [[-self.dot(own, Z[i], S[d]) for d in ks] for i in n]
        dkg = [[self.dot(own, v_new[i], dS[d]) for d in ks] for i in n]

        # kda_intra_bwd, gate_bwd
        dgc = [[0.0] * len(ks) for _ in n]
        for t in n:
            earlier, later = range(t + 1), n[t:]
            Y_row, at = [], rows.start + t
            for d in ks:
                dq = self.dot(
                    "kda_intra_bwd", (dP[t, j] for j in earlier),
                    (k[j][d] * D[t, j][d] for j in earlier),
                )  # fmt: skip
                R = self.dot(
                    "kda_intra_bwd", (dP[i, t] for i in later),
                    (q[i][d] * D[i, t][d] for i in later),
                )  # fmt: skip
                Y = self.dot(
                    "kda_intra_bwd", (dL[t, j] for j in earlier[:-1]),
                    (k[j][d] * D[t, j][d] for j in earlier[:-1]),
                )  # fmt: skip
                R += self.dot(
                    "kda_intra_bwd", (beta[i] * dL[i, t] for i in later[1:]),
                    (k[i][d] * D[i, t][d] for i in later[1:]),
                )  # fmt: skip
                dq += 2 ** gc[t][d] * dqg[t][d]
                Y += 2 ** gc[t][d] * dkb[t][d]
                last = 2 ** (gc[-1][d] - gc[t][d]) * dkg[t][d]
                self.dq[b, at, h, d] += dq
                self.dk[b, at, h, d] += beta[t] * Y + R + last
                dgc[t][d] += q[t][d] * dq + k[t][d] * (beta[t] * Y - R - last)
                dgc[-1][d] += k[t][d] * last
                Y_row.append(Y)
            pairs = ((k[t], Y_row), (Z[t], v[t]))
            self.dbeta[b, at, head] = sum(sum(map(float.__mul__, x, y)) for x, y in pairs)
            self.dv[b, at, head] = beta[t] * torch.tensor(Z[t], dtype=self.dv.dtype)
        for d in ks:
            dgc[-1][d] += 2 ** gc[-1][d] * sum(map(float.__mul__, dS[d], S[d]))
        dgc = torch.tensor(dgc, dtype=self.dg.dtype)
        self.dg[b, rows, head] = dgc.flip(0).cumsum(0).flip(0)
        return before


def same(x, y):
    """What a stage handed on is what the scalar form computes."""
    assert abs(torch.as_tensor(x) - torch.as_tensor(y)).max() < 1e-12


class Decays:
    """Mamba-2 in chunks, both passes: y, and the gradients of x, B and C."""

    def __init__(self, i, dy, chunk_size):
        names = ("cb", "write", "read", "mx", "dstates", "db_state", "dc_state", "dx_state")
        self.count = dict.fromkeys((*names, "mtdy", "dmx", "dscores"), 0)
        self.i, self.dy, self.size = i, dy, chunk_size
        self.y, self.dx, self.dB, self.dC = (torch.zeros_like(x) for x in (i.x, i.x, i.B, i.C))

    def dot(self, what, xs, ys):
        xs, ys = list(xs), list(ys)
        self.count[what] += len(xs)
        return sum(x * y for x, y in zip(xs, ys, strict=True))

    def run(self):
        i, heads = self.i, self.i.x.shape[2] // self.i.B.shape[2]
        for b in range(len(i.x)):
            chunks = [
                slice(t, min(t + self.size, i.x.shape[1]))
                for t in range(0, i.x.shape[1], self.size)
            ]
            for g in range(i.B.shape[2]):
                part = range(g * heads, (g + 1) * heads)
                scores, states = self.group(b, g, part, chunks)
                self.adjoint(b, g, part, chunks, scores, states)

    def parts(self, b, rows, h):
        """x, dy, step and gc of a head's chunk."""
        i = self.i
        step, A = i.dt[b, rows, h].tolist(), i.A[h].item()
        gc = [A * sum(step[: t + 1]) for t in range(len(step))]
        return i.x[b, rows, h].tolist(), self.dy[b, rows, h].tolist(), step, gc

    def group(self, b, g, heads, chunks):
        """Scores of each chunk, and the state before it of each head."""
        N, P = self.i.B.shape[3], self.i.x.shape[3]
        S = {h: [[0.0] * P for _ in range(N)] for h in heads}
        scores, states = [], []
        for rows in chunks:
            B, C = (y[b, rows, g].tolist() for y in (self.i.B, self.i.C))
            n = range(len(B))
            cb = {(i, j): self.dot("cb", C[i], B[j]) for i in n for j in range(i + 1)}
            scores.append(cb)
            states.append({h: [line[:] for line in S[h]] for h in heads})
            for h in heads:
                x, _, step, gc = self.parts(b, rows, h)
                D = self.i.D[h].item()
                for i in n:
                    M = [cb[i, j] * math.exp(gc[i] - gc[j]) * step[j] for j in range(i + 1)]
                    for p in range(P):
                        y = self.dot("mx", M, (x[j][p] for j in range(i + 1))) + D * x[i][p]
                        read = self.dot("read", C[i], (line[p] for line in S[h]))
                        self.y[b, rows.start + i, h, p] = y + math.exp(gc[i]) * read
                for d in range(N):
                    for p in range(P):
                        v = [math.exp(gc[-1] - gc[j]) * step[j] * x[j][p] for j in n]
                        new = self.dot("write", (B[j][d] for j in n), v)
                        S[h][d][p] = math.exp(gc[-1]) * S[h][d][p] + new
        return scores, states

    def adjoint(self, b, g, heads, chunks, scores, states):
        N, P = self.i.B.shape[3], self.i.x.shape[3]
        dS = {h: [[0.0] * P for _ in range(N)] for h in heads}
        for rows, cb, S in reversed(list(zip(chunks, scores, states, strict=True))):
            B, C = (y[b, rows, g].tolist() for y in (self.i.B, self.i.C))
            n, t = range(len(B)), rows.start
            dscores = dict.fromkeys(cb, 0.0)
            for h in heads:
                x, dy, step, gc = self.parts(b, rows, h)
                D, r = self.i.D[h].item(), [math.exp(gc[-1] - y) for y in gc]
                for i, j in cb:
                    decay = math.exp(gc[i] - gc[j]) * step[j]
                    dscores[i, j] += self.dot("dmx", dy[i], x[j]) * decay
                for j in n:
                    for d in range(N):
                        read = self.dot("dc_state", dy[j], S[h][d])
                        self.dC[b, t + j, g, d] += math.exp(gc[j]) * read
                        write = self.dot("db_state", x[j], dS[h][d])
                        self.dB[b, t + j, g, d] += r[j] * step[j] * write
                    after = range(j, len(B))
                    M = [cb[i, j] * math.exp(gc[i] - gc[j]) for i in after]
                    for p in range(P):
                        dxs = r[j] * self.dot("dx_state", B[j], (line[p] for line in dS[h]))
                        dxs += self.dot("mtdy", M, (dy[i][p] for i in after))
                        self.dx[b, t + j, h, p] = step[j] * dxs + D * dy[j][p]
                for d in range(N):
                    for p in range(P):
                        v = [math.exp(gc[i]) * dy[i][p] for i in n]
                        read = self.dot("dstates", (C[i][d] for i in n), v)
                        dS[h][d][p] = math.exp(gc[-1]) * dS[h][d][p] + read
            for i, j in cb:
                for d in range(N):
                    self.dC[b, t + i, g, d] += dscores[i, j] * B[j][d]
                    self.dB[b, t + j, g, d] += dscores[i, j] * C[i][d]
                self.count["dscores"] += N
