"""Mistakes in the puzzles' solutions, which the check must name."""

# number -> what is replaced in the solution, by what, and an output that it makes wrong
PLANTED = {
    "w1": [("2 * b_x + 1", "2 * b_x - 1", "Triton", "y")],
    "w2": [
        ("m = o < N  #", "m = o < N + 1  #", "Triton", "y"),
        ("tl.program_id(0) * BN + ", "", "Triton", "y"),
    ],
    "w3": [
        ("mask=o < N", "mask=o < BN", "Triton", "s"),
        ("i * N + o", "i * BN + o", "Triton", "s"),
    ],
    "w4": [("o_i[:, None] * N + o_j[None, :]", "o_i[:, None] + o_j[None, :]", "Triton", "P")],
    "w5": [("o, o, N, K, N)", "o, o, K, K, N)", "Triton", "P")],
    "w6": [("tl.cumsum(b_x, axis=0)  #", "tl.cumsum(b_x, axis=0) - b_x  #", "Triton", "y")],
    "w7": [
        ("o[:, None] >= o[None, :]", "o[:, None] > o[None, :]", "Triton", "G"),
        ('tl.where(causal, exponent, float("-inf")))', "exponent) * causal", "Triton", "G"),
    ],
    "w8": [("b_x - s, b_x", "b_x + s, b_x", "Triton", "x")],
    "w9": [("x_ptr + t * D", "x_ptr + t", "Triton", "y")],
    "01": [
        ("v[:, t] - k[:, t] @ S", "v[:, t] - q[:, t] @ S", "PyTorch", "o"),
        ("(tl.load(beta_ptr + i) * b_e)", "b_e", "Triton", "final_state"),
    ],
    "02": [
        ("masked_fill(future, -torch.inf)", "masked_fill(future, 0)", "PyTorch", "G"),
        ("tl.cumsum(b_g * LOG2E, axis=0)", "tl.cumsum(b_g, axis=0)", "Triton", "gc"),
        ("o_t[:, None] >= o_t[None, :]", "o_t[:, None] > o_t[None, :]", "Triton", "G"),
    ],
    "03": [
        ("b[..., None] * (K @ K.mT)", "b[..., None, :] * (K @ K.mT)", "PyTorch", "A"),
        ("b_A - b_x[None, :]", "b_A + b_x[None, :]", "Triton", "A"),
    ],
    "04": [
        ("w = e * (A @ (b * K))", "w = (A * decay_matrix(gc)) @ (b * K)", "PyTorch", "w"),
        ("b_A * b_beta[None, :]", "b_A * b_beta[:, None]", "Triton", "u"),
    ],
    "05": [
        ("U_c - W_c @ S", "U_c + W_c @ S", "PyTorch", "v_new"),
        ("i_h // (HV // H)", "i_h % H", "Triton", "h"),
        ("b_u - dot(b_w, b_S)", "b_u", "Triton", "v_new"),
    ],
    "06": [
        ("scale * (inter + P @ V)", "inter + scale * (P @ V)", "PyTorch", "o"),
        (" * decay_tile(b_gc, o_t)", "", "Triton", "o"),
    ],
    "07": [
        ("masked_fill(i < j, -torch.inf)", "masked_fill(i <= j, -torch.inf)", "PyTorch", "P"),
        ("b_beta * tl.sum", "tl.sum", "Triton", "A"),
    ],
    "08": [
        (" - flow.sum(-2)", "", "PyTorch", "dgc"),
        ("tl.trans(cast(b_M * G, b_do.dtype))", "tl.trans(b_M)", "Triton", "dv_new"),
    ],
    "09": [
        ("- W_c.mT @ dv ", "- W_c.mT @ dV_c ", "PyTorch", "dh0"),
        ("NT - 1 - step", "step", "Triton", "dh"),
    ],
    "10": [
        ("(N + N.mT) @ K", "N @ K", "PyTorch", "dk"),
        (" + tl.sum(b_dL * b_KK, 1)", "", "Triton", "dbeta"),
    ],
    "11": [
        ("decay * (dP_j * Q + b * dL_j * K)", "decay * (dP_j * Q + dL_j * K)", "PyTorch", "dk"),
        ("K * (b * Y - R)", "K * (b * Y + R)", "PyTorch", "dgc"),
        ("b_l * b_E * b_kj", "b_beta * b_l * b_E * b_kj", "Triton", "dbeta"),
    ],
    "12": [
        ("(dg * -rate * F.softplus(x))", "(dg * -rate)", "PyTorch", "dA_log"),
        ("axis=0, reverse=True", "axis=0", "Triton", "da"),
    ],
    "12d": [
        ("(b_t * k_t).mT @ de", "k_t.mT @ (k_t @ (b_t.mT * dS))", "PyTorch", "dh0"),
        ("e @ dS.mT + b_t * dr", "e @ dS.mT + dr", "PyTorch", "dk"),
        ("(b_b * b_k)[:, None] * b_S", "b_k[:, None] * b_S", "Triton", "dk"),
        ("(b_b * b_k)[:, None] * b_de[None, :]", "b_k[:, None] * b_de[None, :]", "Triton", "dh0"),
    ],
    "12e": [
        ("torch.exp2(gp) * (dX", "torch.exp2(gc) * (dX", "PyTorch", "da"),
        ("(A * dA)[..., 1:, :]", "(A * dA)[..., :-1, :]", "PyTorch", "dgc"),
        ("torch.exp2(gc[..., -1, :]) * (h * dh)", "(h * dh)", "PyTorch", "dgc"),
        ("b_a * tl.exp2(b_gc) * dot", "b_a * tl.exp2(b_gp) * dot", "Triton", "dgc"),
        ("b_last[None, :] - b_gc)", "b_gc)", "Triton", "dk"),
    ],
    "13": [
        ("step[..., None, :]", "step[..., None]", "PyTorch", "y"),
        (" * b_step[None, :]", "", "Triton", "y"),
    ],
    "14": [
        ("(e * C).mT @ dY", "C.mT @ dY", "PyTorch", "dh_out"),
        ("i_h // (H // G)", "i_h % G", "Triton", "dh_out"),
    ],
    "15": [
        ("(a_c * h[:, c] * dS)", "(h[:, c] * dS)", "PyTorch", "dlast"),
        ("tl.minimum((i_t + 1) * BT, T) - 1", "i_t * BT", "Triton", "dh0"),
    ],
    "16": [
        ("gc[..., -1:] - gc", "gc", "PyTorch", "dB_state"),
        ("tl.sum(b_B * b_dB, 1)", "tl.sum(b_B * b_sum, 1)", "Triton", "dgc"),
    ],
    "17": [
        ("dB + dscores.mT @ C ", "dB + dscores @ C ", "PyTorch", "dB"),
        ("b_dC += dot(b_sum, b_B)", "b_dC += dot(b_ds, b_B)", "Triton", "dC"),
    ],
    "18": [
        ("P.mT @ dY + r", "P @ dY + r", "PyTorch", "dx"),
        ("b_step[:, None] * b_dxs", "b_dxs", "Triton", "dx"),
    ],
    "19": [
        ("(M * dM).tril(-1)", "dM.tril(-1)", "PyTorch", "dgc"),
        ("tl.sum(b_W, 1) - tl.sum(b_W, 0)", "tl.sum(b_W, 1)", "Triton", "dgc"),
    ],
    "20": [
        ("-torch.expm1(g)", "torch.exp(g)", "PyTorch", "y"),
        ("== BT - 1, b_y", "== 0, b_y", "Triton", "final_state"),
    ],
    "21": [
        ("torch.eye(DK, dtype=k.dtype)", "torch.zeros(DK, DK, dtype=k.dtype)", "PyTorch", "M"),
        ("dot(b_M, b_in) + b_S", "b_in + b_S", "Triton", "S_out"),
    ],
    "22": [
        ("W_c.mT @ (K_c @ dM)", "K_c.mT @ (W_c @ dM)", "PyTorch", "dM"),
        ("(NT - 1 - step) * BT", "step * BT", "Triton", "dM"),
        ("dot(b_dM, b_out) + b_dS", "dot(tl.trans(b_dM), b_out) + b_dS", "Triton", "dS_in"),
    ],
    "23": [
        ("F.pad(S[..., n:], (0, n)) + last", "last", "PyTorch", "S_in"),
        ("u[:, 1 + j : 1 + j + end - begin]", "u[:, j : j + end - begin]", "PyTorch", "y"),
        ("end - W + o_w", "begin + o_w", "Triton", "S_ext"),
        ("place = W + t", "place = W - 1 + t", "Triton", "y"),
    ],
    "24": [
        ("AG_c.mT @ dv_new", "AG_c @ dv_new", "PyTorch", "Z"),
        ("(e * K_c).mT @ dV_c", "(e * K_c).mT @ Z_c", "PyTorch", "dh0"),
        ("dot(tl.trans(b_P), b_do)", "dot(b_P, b_do)", "Triton", "dv"),
        ("dot(tl.trans(b_k), b_e * b_dv)", "dot(tl.trans(b_k), b_dv)", "Triton", "dh0"),
    ],
    "25": [
        ("scan(S_in, K, W, U, gc)", "scan(S_ext, K, W, U, gc)", "PyTorch", "v_new"),
        ("M[:, :, p] @ S + S_ext", "M[:, :, p].mT @ S + S_ext", "PyTorch", "S_in"),
        ("tl.minimum(begin + L // BT, tl.cdiv(T, BT))", "begin + L // BT", "Triton", "S_ext"),
        ("begin = i_p * (L // BT)  #", "begin = i_p * (L // BT) + 1  #", "Triton", "M"),
    ],
    "26": [
        ("slots[torch.arange(N), accepted - 1]", "slots[:, 0]", "PyTorch", "o"),
        ("q[:, t] @ S + qk * e", "q[:, t] @ S", "PyTorch", "o"),
        (
            "i_n * T + tl.load(accepted_ptr + i_n) - 1",
            "i_n * T + tl.load(accepted_ptr + i_n)",
            "Triton",
            "pool",
        ),
        (
            "place_t = i_n * T + t  #",
            "place_t = i_n * T + T - 1 - t  #",
            "Triton",
            "pool",
        ),
    ],
    "27": [
        ("u[:, j : j + T]", "u[:, W - 1 - j : W - 1 - j + T]", "PyTorch", "k"),
        ("rstd * (dn - n * (n * dn).mean(-1, keepdim=True))", "rstd * dn", "PyTorch", "do"),
        ("tl.sum(b_o * b_o, 1) / D", "tl.sum(b_o * b_o, 1) / BD", "Triton", "y"),
    ],
}
