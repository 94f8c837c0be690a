//! Block codecs with the host's bytes: first what each header says, then every word of the body by a unit of its own. A block
//! need not fill whole words.

mod exact;
mod fit;
mod pack;

use cubecl::prelude::*;

use self::exact::sum;
use super::{Cube, bytes, cubes, grid};
use crate::codec::{BlockCodec, Code};
use crate::{Result, View, ViewMut};

/// What kernels are made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Form {
    codec: BlockCodec,
    /// Whether values are sums with a residual.
    residual: bool,
}

impl Form {
    /// The largest code of an integer.
    fn most(self) -> f32 {
        ((1 << (self.codec.code().bits() - 1)) - 1) as f32
    }

    /// The bits of the largest scale of an integer: all its multiples are finite.
    fn top(self) -> u32 {
        (f32::MAX / self.most()).to_bits() & 0xffff_0000
    }

    fn signs(self) -> bool {
        matches!(self.codec.code(), Code::SignL1 | Code::SignL2)
    }
}

/// The bits of a value to be encoded.
#[cube]
fn value(x: &[u32], before: &[u32], at: u32, #[comptime] form: Form) -> u32 {
    let mut bits = x[at as usize];
    if comptime!(form.residual) {
        bits = sum(bits, before[at as usize]);
    }
    bits
}

/// Lengths that kernels address with 32 bits; buffers are never larger.
fn u32_of(n: usize) -> u32 {
    u32::try_from(n).expect("no buffer has more than 2^32 elements")
}

impl crate::backend::Codecs for Cube {
    fn encode(
        &self,
        codec: BlockCodec,
        x: View<'_>,
        residual: Option<(View<'_>, ViewMut<'_>)>,
        out: ViewMut<'_>,
    ) -> Result<()> {
        let (len, words) = (x.len(), codec.words(x.len()));
        let blocks = len.div_ceil(codec.block() as usize);
        let form = Form { codec, residual: residual.is_some() };
        let (x, out) = (self.read(&x)?, self.write(&out)?);
        let residual =
            residual.map(|(before, after)| Ok((self.read(&before)?, self.write(&after)?))).transpose()?;
        let scratch = self.scratch(blocks * 8)?;
        let fits = Self::whole(&scratch);
        let before = || residual.as_ref().map_or(&x, |(before, _)| before).arg();
        let client = &self.client;
        // Compilers must not know that this is 0.
        let (len, zero) = (u32_of(len), 0);
        let count = cubes(blocks);
        fit::fit::launch(
            client,
            count,
            CubeDim::new_1d(self.units),
            x.arg(),
            before(),
            fits.arg(),
            len,
            zero,
            form,
            self.units,
        );
        let after = residual.as_ref().map_or(&fits, |(_, after)| after).arg();
        let (count, dim) = grid(words, self.units);
        pack::encode::launch(
            client,
            count,
            dim,
            x.arg(),
            before(),
            fits.arg(),
            after,
            out.arg(),
            len,
            zero,
            form,
        );
        let (count, dim) = grid(blocks, self.units);
        pack::refuse::launch(client, count, dim, fits.arg(), out.arg(), u32_of(blocks));
        self.pool.give(scratch);
        self.settle([x, out]);
        self.settle(residual.into_iter().flat_map(|(before, after)| [before, after]));
        Ok(())
    }

    fn decode(&self, codec: BlockCodec, body: View<'_>, y: ViewMut<'_>, verdict: ViewMut<'_>) -> Result<()> {
        let len = y.len();
        let form = Form { codec, residual: false };
        let (body, y, verdict) = (self.read(&body)?, self.write(&y)?, self.write(&verdict)?);
        let (count, dim) = grid(1, self.units);
        bytes::fill::launch(&self.client, count, dim, verdict.arg(), 0.0);
        let (count, dim) = grid(len, self.units);
        pack::decode::launch(&self.client, count, dim, body.arg(), y.arg(), verdict.arg(), u32_of(len), form);
        self.settle([body, y, verdict]);
        Ok(())
    }
}
