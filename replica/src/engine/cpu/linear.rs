//! Linear layers: the matrix products of a model, each behind one call.
//!
//! A [`LinearSource`] says what a layer is made of. [`Linears::obtain`] packs all layers of a model, or finds them packed
//! by another process; a [`LinearId`] stands for one of them. Whoever computes a batch says which rows go in, what
//! becomes of the result ([`Finish`]) and where it goes; how weights lie in memory is known here and below.
//!
//! There are two ways to ask. [`Linears::apply`] computes a window on the calling thread: for threads that carry a block
//! of rows through several layers. [`Linears::apply_by_all`] computes a whole matrix on all threads, cut by columns, so
//! that each thread reads its own part of the weights: for a few rows. Both come to the same bits.

use std::ops::Range;

use replica_core::Precision;

use super::kernel::{ByteProduct, ByteRows, Finish, Isa, Product, Quantize};
use super::laps::{Laps, Stage};
use super::matrix::{Cut, Matrix, View, Window};
use super::packed::{Packed, PackedCache, Weights, WeightsPlace};
use super::panels::{GATED_COLUMNS, PANEL, panel_order, panels_of};
use super::threads::Threads;
use crate::model::{ModelError, Tensor};

/// Parts of a product by all threads per thread, so that a thread that was interrupted holds up little.
const PARTS_PER_THREAD: usize = 3;

/// Rows of one part of a product by all threads.
const PART_ROWS: usize = 140;

/// What one linear layer is made of.
pub(super) struct LinearSource {
    /// Numbers of one input row.
    pub(super) inputs: usize,
    /// Rows of weights, a row per output: the parts' outputs stand side by side, each times its factor.
    pub(super) parts: Vec<(Tensor, f32)>,
    /// One number per output of all parts, its factor included.
    pub(super) bias: Option<Vec<f32>>,
    /// Whether the first half of the outputs are gates for the second half. Then [`Finish::Gate`] is the only finish, and
    /// a row that comes out has half the width.
    pub(super) gated: bool,
}

impl LinearSource {
    /// Refuses weights that are not finite once they are multiplied by their factor.
    pub(super) fn check_finite(&self) -> Result<(), ModelError> {
        self.parts.iter().try_for_each(|(part, factor)| part.check_finite(*factor))
    }

    /// Outputs of all parts.
    pub(super) fn outputs(&self) -> usize {
        self.parts.iter().map(|(part, _)| part.rows()).sum()
    }
}

/// The layers of a model that are to be packed.
#[derive(Default)]
pub(super) struct LinearSources(Vec<LinearSource>);

impl LinearSources {
    /// Refuses weights that are not finite, all of them together.
    pub(super) fn check_finite(&self) -> Result<(), ModelError> {
        let problems = self.0.iter().filter_map(|source| source.check_finite().err()).collect();
        ModelError::of_all(problems).map_or(Ok(()), Err)
    }

    /// One more.
    pub(super) fn add(&mut self, source: LinearSource) -> LinearId {
        let outputs = source.outputs();
        assert!(source.bias.as_ref().is_none_or(|bias| bias.len() == outputs), "a bias for each output");
        assert!(!source.gated || outputs.is_multiple_of(2), "a gate for each output");
        self.0.push(source);
        LinearId(self.0.len() - 1)
    }
}

/// A layer of a [`Linears`].
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearId(usize);

/// The linear layers of a model.
pub(super) struct Linears {
    packed: Packed,
    layers: Vec<Layer>,
}

/// What is known of a layer beside its weights.
struct Layer {
    /// Numbers of a row that comes out.
    width: usize,
    /// In the order of panels, which are full; all zeros if the model has none.
    bias: Vec<f32>,
    gated: bool,
}

/// A thread's room for the products that it computes.
#[derive(Default)]
pub(super) struct LinearScratch {
    /// Rows that go in, as bytes.
    bytes: ByteRows,
    /// What the thread's time goes to.
    pub(super) laps: Laps,
}

impl Linears {
    /// Packs the layers, or finds them packed. Weights that are not finite are refused.
    pub(super) fn obtain(
        sources: LinearSources,
        precision: Precision,
        cache: Option<&PackedCache>,
    ) -> Result<(Linears, WeightsPlace), ModelError> {
        let layers = sources.0.iter().map(Layer::of).collect();
        let (packed, place) = Packed::obtain(&sources.0, precision, cache)?;
        Ok((Linears { packed, layers }, place))
    }

    /// Numbers of a row that comes out.
    pub(super) fn width(&self, layer: LinearId) -> usize {
        self.layers[layer.0].width
    }

    /// Computes the columns of `out` for all rows of `input`, which has as many. The first column of `out` must begin a
    /// panel, as the first column of all does.
    pub(super) fn apply(
        &self,
        isa: Isa,
        layer: LinearId,
        input: View<'_>,
        finish: Finish,
        out: &mut Window<'_>,
        scratch: &mut LinearScratch,
    ) {
        self.prepare(isa, layer, input, scratch);
        let rows = 0..input.rows();
        self.compute(isa, layer, input, rows, finish, out, scratch);
    }

    /// Computes all of `out`, whose size is right, by all threads; `rooms` are one for each.
    #[expect(clippy::too_many_arguments, reason = "a product and who computes it")]
    pub(super) fn apply_by_all<R: AsMut<LinearScratch> + Send>(
        &self,
        isa: Isa,
        threads: &mut Threads,
        rooms: &mut [R],
        layer: LinearId,
        input: &Matrix,
        finish: Finish,
        out: &mut Matrix,
    ) {
        let (rows, width) = (out.rows(), out.width());
        let unit = if self.layers[layer.0].gated { GATED_COLUMNS } else { PANEL };
        let blocks = Cut::even(rows, rows.div_ceil(PART_ROWS), 1);
        let columns = Cut::even(width, PARTS_PER_THREAD * threads.count(), unit);
        // Each thread rounds all rows for itself: they are few, and threads would have to meet once more to share them.
        let prepare = |room: &mut R| self.prepare(isa, layer, input.view(0..rows), room.as_mut());
        threads.for_each_prepared(rooms, out.tiles(blocks, columns), prepare, |room, mut out| {
            let rows = out.rows();
            self.compute(isa, layer, input.view(rows.clone()), rows, finish, &mut out, room.as_mut());
        });
    }

    /// Rounds what goes into a layer of bytes.
    fn prepare(&self, isa: Isa, layer: LinearId, input: View<'_>, scratch: &mut LinearScratch) {
        match self.packed.layer(layer.0) {
            Weights::Numbers(_) => {}
            Weights::Bytes(_) => {
                let begin = scratch.laps.begin();
                isa.run(Quantize { rows: input, out: &mut scratch.bytes });
                scratch.laps.end(Stage::Rounding, begin);
            }
        }
    }

    /// Computes, from `input` or from these rows of what was prepared.
    #[expect(clippy::too_many_arguments, reason = "a product, and its input in two forms")]
    fn compute(
        &self,
        isa: Isa,
        layer: LinearId,
        input: View<'_>,
        rows: Range<usize>,
        finish: Finish,
        out: &mut Window<'_>,
        scratch: &mut LinearScratch,
    ) {
        let Layer { bias, gated, .. } = &self.layers[layer.0];
        assert!(*gated == matches!(finish, Finish::Gate(_)), "gates belong to a gated layer");
        let LinearScratch { bytes, laps } = scratch;
        match self.packed.layer(layer.0) {
            Weights::Numbers(weights) => isa.run(Product { input, weights, bias, finish, out, laps }),
            Weights::Bytes(weights) => {
                let input = &*bytes;
                isa.run(ByteProduct { isa, input, rows, weights, bias, finish, out, laps });
            }
        }
    }
}

impl Layer {
    fn of(source: &LinearSource) -> Layer {
        let outputs = source.outputs();
        let mut bias = vec![0.0; panels_of(outputs, source.gated) * PANEL];
        for (output, value) in source.bias.iter().flatten().enumerate() {
            bias[panel_order(output, outputs, source.gated)] = *value;
        }
        let width = if source.gated { outputs / 2 } else { outputs };
        Layer { width, bias, gated: source.gated }
    }
}
