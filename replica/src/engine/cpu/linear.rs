//! Linear layers: the matrix products of a model, each behind one call.
//!
//! A [`LinearSource`] describes a layer. [`Linears::obtain`] packs all layers of a model, or finds them packed by
//! another process; a [`LinearId`] identifies one of them. The caller passes the input rows, the epilogue ([`Finish`])
//! and the output; the memory layout of weights is private to this module and those below.
//!
//! There are two entry points. [`Linears::apply`] computes a window on the calling thread: for threads that take a
//! block of rows through several layers. [`Linears::apply_by_all`] computes a whole matrix on all threads, partitioned
//! by columns, so that each thread reads its own part of the weights: for few rows. The results of both are equal bit
//! for bit.

use std::ops::Range;

use replica_core::Precision;

use super::kernel::{ByteProduct, ByteRows, Finish, Isa, Product, Quantize};
use super::matrix::{Matrix, MatrixView, Partition, Window};
use super::packed::{PackedLayers, PackedWeights};
use super::packed_file::{PackedCache, WeightsLocation};
use super::panels::{GATED_COLUMNS, LinearSource, PANEL, panel_order, panels_of};
use super::profile::{ComputeStage, StageTicks};
use super::threads::ThreadPool;
use crate::model::ModelError;

/// Parts per thread of a product on all threads: small enough that an interrupted thread delays the others little.
const PARTS_PER_THREAD: usize = 3;

/// Rows of one part of a product on all threads.
const PART_ROWS: usize = 140;

/// Layers of a model to pack.
#[derive(Default)]
pub(super) struct LinearSources(Vec<LinearSource>);

impl LinearSources {
    /// Rejects weights that are not finite, in all layers together.
    pub(super) fn check_finite(&self) -> Result<(), ModelError> {
        let problems = self.0.iter().filter_map(|source| source.check_finite().err()).collect();
        ModelError::of_all(problems).map_or(Ok(()), Err)
    }

    /// Adds a layer.
    pub(super) fn add(&mut self, source: LinearSource) -> LinearId {
        let outputs = source.outputs();
        assert!(source.bias.as_ref().is_none_or(|bias| bias.len() == outputs), "one bias for each output");
        assert!(!source.gated || outputs.is_multiple_of(2), "one gate for each output");
        self.0.push(source);
        LinearId(self.0.len() - 1)
    }
}

/// Identifier of a layer of a [`Linears`].
#[derive(Clone, Copy, Debug)]
pub(super) struct LinearId(usize);

/// Linear layers of a model.
pub(super) struct Linears {
    packed: PackedLayers,
    layers: Vec<LinearLayer>,
}

/// Properties of a layer besides its weights.
struct LinearLayer {
    /// Numbers of an output row.
    width: usize,
    /// In the order of panels, which are full; all zeros if the model has no bias.
    bias: Vec<f32>,
    gated: bool,
}

/// Local memory of a thread for the products that it computes.
#[derive(Default)]
pub(super) struct LinearScratch {
    /// Quantized input rows.
    bytes: ByteRows,
    /// Profile counters of the thread.
    pub(super) stage_ticks: StageTicks,
}

impl Linears {
    /// Packs the layers, or finds them packed. Rejects weights that are not finite.
    pub(super) fn obtain(
        sources: LinearSources,
        precision: Precision,
        cache: Option<&PackedCache>,
    ) -> Result<(Linears, WeightsLocation), ModelError> {
        let layers = sources.0.iter().map(LinearLayer::of).collect();
        let (packed, location) = PackedLayers::obtain(&sources.0, precision, cache)?;
        Ok((Linears { packed, layers }, location))
    }

    /// Returns the numbers of an output row.
    pub(super) fn width(&self, layer: LinearId) -> usize {
        self.layers[layer.0].width
    }

    /// Computes the columns of `out` for all rows of `input`, which has the same number of rows. The first column of
    /// `out` must be the first of a panel.
    pub(super) fn apply(
        &self,
        isa: Isa,
        layer: LinearId,
        input: MatrixView<'_>,
        finish: Finish,
        out: &mut Window<'_>,
        scratch: &mut LinearScratch,
    ) {
        self.prepare(isa, layer, input, scratch);
        let rows = 0..input.rows();
        self.compute(isa, layer, input, rows, finish, out, scratch);
    }

    /// Computes all of `out`, which has the right size, on all threads; `scratch` has one element for each.
    #[expect(clippy::too_many_arguments, reason = "a product and its threads")]
    pub(super) fn apply_by_all<R: AsMut<LinearScratch> + Send>(
        &self,
        isa: Isa,
        threads: &mut ThreadPool,
        scratch: &mut [R],
        layer: LinearId,
        input: &Matrix,
        finish: Finish,
        out: &mut Matrix,
    ) {
        let (rows, width) = (out.rows(), out.width());
        let unit = if self.layers[layer.0].gated { GATED_COLUMNS } else { PANEL };
        let blocks = Partition::even(rows, rows.div_ceil(PART_ROWS), 1);
        let columns = Partition::even(width, PARTS_PER_THREAD * threads.count(), unit);
        // Each thread quantizes all rows for itself: they are few, and sharing them would need one more
        // synchronization.
        let prepare = |local: &mut R| self.prepare(isa, layer, input.view(0..rows), local.as_mut());
        threads.for_each_prepared(scratch, out.tiles(blocks, columns), prepare, |local, mut out| {
            let rows = out.rows();
            self.compute(isa, layer, input.view(rows.clone()), rows, finish, &mut out, local.as_mut());
        });
    }

    /// Quantizes the input of an int8 layer.
    fn prepare(&self, isa: Isa, layer: LinearId, input: MatrixView<'_>, scratch: &mut LinearScratch) {
        match self.packed.layer(layer.0) {
            PackedWeights::Numbers(_) => {}
            PackedWeights::Bytes(_) => {
                let begin = scratch.stage_ticks.begin();
                isa.run(Quantize { rows: input, out: &mut scratch.bytes });
                scratch.stage_ticks.end(ComputeStage::Rounding, begin);
            }
        }
    }

    /// Computes a product from `input`, or from these rows of the quantized input.
    #[expect(clippy::too_many_arguments, reason = "a product, and its input in two formats")]
    fn compute(
        &self,
        isa: Isa,
        layer: LinearId,
        input: MatrixView<'_>,
        rows: Range<usize>,
        finish: Finish,
        out: &mut Window<'_>,
        scratch: &mut LinearScratch,
    ) {
        let LinearLayer { bias, gated, .. } = &self.layers[layer.0];
        assert!(*gated == matches!(finish, Finish::Gate(_)), "gates belong to a gated layer");
        let LinearScratch { bytes, stage_ticks } = scratch;
        match self.packed.layer(layer.0) {
            PackedWeights::Numbers(weights) => {
                isa.run(Product { input, weights, bias, finish, out, stage_ticks })
            }
            PackedWeights::Bytes(weights) => {
                let input = &*bytes;
                isa.run(ByteProduct { isa, input, rows, weights, bias, finish, out, stage_ticks });
            }
        }
    }
}

impl LinearLayer {
    fn of(source: &LinearSource) -> LinearLayer {
        let outputs = source.outputs();
        let mut bias = vec![0.0; panels_of(outputs, source.gated) * PANEL];
        for (output, value) in source.bias.iter().flatten().enumerate() {
            bias[panel_order(output, outputs, source.gated)] = *value;
        }
        let width = if source.gated { outputs / 2 } else { outputs };
        LinearLayer { width, bias, gated: source.gated }
    }
}
