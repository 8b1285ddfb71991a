# mypy: ignore-errors
"""A Triton kernel of cross entropy, which overwrites logits by their gradient. It reads them twice: once for the loss, where a
running maximum lets maximum and sum of exponentials share a pass (Milakov and Gimelshein, arXiv 1805.02867; so does Liger
Kernel, arXiv 2410.10989), and once for the gradient."""

import triton
import triton.language as tl


@triton.jit
def cross_entropy(
    logits_ptr,
    target_ptr,
    losses_ptr,
    vocabulary,
    ignore_index,
    smoothing,
    HAS_SMOOTHING: tl.constexpr,
    WANTS_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each program computes, in fp32, the loss of one token from its row of contiguous ``logits`` (n, ``vocabulary``). With
    ``WANTS_GRADIENT`` the gradient overwrites the row, rounded once to the logits' dtype. An ignored token's loss and gradient
    are 0. Other tokens' targets must be labels. With ``HAS_SMOOTHING`` the label weighs ``1 - smoothing``, and the whole
    vocabulary, with the label, shares the rest."""
    logits_ptr += tl.program_id(0).to(tl.int64) * vocabulary
    target = tl.load(target_ptr + tl.program_id(0))
    if target == ignore_index:
        tl.store(losses_ptr + tl.program_id(0), 0.0)
        if WANTS_GRADIENT:
            for begin in range(0, vocabulary, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                tl.store(logits_ptr + at, tl.zeros([BLOCK], logits_ptr.dtype.element_ty), at < vocabulary)
    else:
        # Each lane has its own maximum and sum, which are joined at the end. The maximum begins with the lowest finite number,
        # since the difference of two infinite ones isn't a number.
        peaks = tl.full([BLOCK], -3.4028234663852886e38, tl.float32)
        sums = tl.zeros([BLOCK], tl.float32)
        logit_sums = tl.zeros([BLOCK], tl.float32)
        labels = tl.zeros([BLOCK], tl.float32)  # the label's logit in its lane, 0 in the others
        for begin in range(0, vocabulary, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + at, at < vocabulary, other=-float("inf")).to(tl.float32)
            higher = tl.maximum(peaks, x)
            sums = sums * tl.exp(peaks - higher) + tl.exp(x - higher)
            peaks = higher
            labels = tl.where(at == target, x, labels)
            if HAS_SMOOTHING:
                logit_sums += tl.where(at < vocabulary, x, 0.0)
        peak = tl.max(peaks, 0)
        log_sum = tl.log(tl.sum(sums * tl.exp(peaks - peak), 0))
        loss = log_sum - (tl.sum(labels, 0) - peak)
        if HAS_SMOOTHING:
            loss = (1.0 - smoothing) * loss + smoothing * (log_sum - (tl.sum(logit_sums, 0) / vocabulary - peak))
        tl.store(losses_ptr + tl.program_id(0), loss)
        if WANTS_GRADIENT:
            for begin in range(0, vocabulary, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                x = tl.load(logits_ptr + at, at < vocabulary, other=0.0).to(tl.float32)
                gradient = tl.exp(x - peak - log_sum)
                if HAS_SMOOTHING:
                    gradient -= smoothing / vocabulary + tl.where(at == target, 1.0 - smoothing, 0.0)
                else:
                    gradient -= tl.where(at == target, 1.0, 0.0)
                tl.store(logits_ptr + at, gradient.to(logits_ptr.dtype.element_ty), at < vocabulary)
