//! Matrix products: rows of activations times weights in panels.
//!
//! Weights are in panels of [`PANEL`] columns; within a panel, the columns' weights for one input are side by side.
//! Rows are multiplied in tiles: [`super::tile`] for floats, [`super::dots`] for bytes. This module contains the rest:
//! the order of panels and rows, prefetching, and the epilogues.

use std::ops::Range;

use super::byte_isa::Dots;
use super::dots::{ByteTile, WholeSums};
use super::math::{activate, activate_coarse};
use super::quantize::{ByteRange, ByteRows};
use super::tile::{MAX_TILE_ROWS, Tile, tiles};
use super::{Isa, Kernel, Simd, load_up_to, store_up_to};
use crate::engine::cpu::byte_panels::BytePanels;
use crate::engine::cpu::matrix::{MatrixView, Window};
use crate::engine::cpu::panels::{GATED_COLUMNS, Line, PANEL, Panels};
use crate::engine::cpu::profile::{ComputeStage, StageTicks};
use crate::model::Activation;

/// Sums of a tile: a line per row, aligned to cache lines.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct FloatSums(pub(super) [Line; MAX_TILE_ROWS]);

/// Epilogue of a product.
#[derive(Clone, Copy)]
pub(in super::super) enum Finish {
    /// Stores the product.
    Store,
    /// Stores the activation of the product.
    Activate(Activation),
    /// Adds the product to the previous content.
    Add,
    /// For a gated layer: stores the activation of the gate, times the gated output.
    Gate(Activation),
}

/// Sums of a tile's rows and one panel, before the epilogue.
trait TileSums {
    /// Whether the result is quantized to bytes, or has only the precision that this needs.
    const COARSE: bool;

    /// Values that are common to all rows, from a column on.
    type Columns<S: Simd>: Copy;

    fn columns<S: Simd>(&self, simd: S, column: usize) -> Self::Columns<S>;

    /// Returns the sums of this row of the tile, from this column on.
    fn value<S: Simd>(&self, simd: S, row: usize, column: usize, columns: Self::Columns<S>) -> S::Vector;
}

struct BiasedSums<'a> {
    sums: &'a FloatSums,
    bias: &'a Line,
}

impl TileSums for BiasedSums<'_> {
    const COARSE: bool = false;
    type Columns<S: Simd> = S::Vector;

    #[inline(always)]
    fn columns<S: Simd>(&self, simd: S, column: usize) -> S::Vector {
        simd.load(&self.bias[column..])
    }

    #[inline(always)]
    fn value<S: Simd>(&self, simd: S, row: usize, column: usize, bias: S::Vector) -> S::Vector {
        simd.add(simd.load(&self.sums.0[row][column..]), bias)
    }
}

struct DequantizedSums<'a> {
    sums: &'a WholeSums,
    /// One for each row of the tile.
    ranges: &'a [ByteRange],
    scales: &'a Line,
    weight_sums: &'a Line,
    bias: &'a Line,
}

impl TileSums for DequantizedSums<'_> {
    const COARSE: bool = true;
    /// Scale, sum of weights, bias.
    type Columns<S: Simd> = [S::Vector; 3];

    #[inline(always)]
    fn columns<S: Simd>(&self, simd: S, column: usize) -> [S::Vector; 3] {
        [self.scales, self.weight_sums, self.bias].map(|line| simd.load(&line[column..]))
    }

    #[inline(always)]
    fn value<S: Simd>(
        &self,
        simd: S,
        row: usize,
        column: usize,
        [scale, weight_sum, bias]: [S::Vector; 3],
    ) -> S::Vector {
        let range = self.ranges[row];
        let low = simd.mul(simd.splat(range.low), weight_sum);
        let sums = simd.mul_add(simd.load_whole(&self.sums.0[row][column..]), simd.splat(range.step), low);
        simd.mul_add(sums, scale, bias)
    }
}

impl Finish {
    /// Returns the number of output columns of a panel.
    #[inline(always)]
    fn columns(self) -> usize {
        match self {
            Finish::Store | Finish::Activate(_) | Finish::Add => PANEL,
            Finish::Gate(_) => GATED_COLUMNS,
        }
    }

    /// Returns the panels of these columns.
    #[inline(always)]
    fn panels(self, columns: &Range<usize>) -> Range<usize> {
        let each = self.columns();
        assert!(columns.start.is_multiple_of(each), "a part of a product begins with a panel");
        columns.start / each..columns.end.div_ceil(each)
    }

    /// Prefetches the output of these rows and this panel, while the sums are computed.
    #[inline(always)]
    fn prefetch_output<S: Simd>(self, simd: S, out: &mut Window<'_>, rows: Range<usize>, panel: usize) {
        match self {
            Finish::Store | Finish::Add => {}
            // The buffer between two products was written a moment ago.
            Finish::Activate(_) | Finish::Gate(_) => return,
        }
        let (columns, all) = (self.columns(), out.columns());
        let first = panel * columns;
        let width = columns.min(all.end - first);
        let mut out = out.reborrow();
        for row in rows {
            simd.prefetch_near(&out.row_mut(row)[first - all.start..][..width]);
        }
    }

    /// Writes the output of a tile. The epilogue is selected once for all rows.
    #[inline(always)]
    fn tile<S: Simd>(
        self,
        simd: S,
        tile_sums: &impl TileSums,
        out: &mut Window<'_>,
        rows: Range<usize>,
        panel: usize,
    ) {
        let place = TilePosition { rows, first: panel * self.columns() - out.columns().start };
        match self {
            Finish::Store => place.fill(simd, tile_sums, StoreEpilogue, out),
            Finish::Add => place.fill(simd, tile_sums, AddEpilogue, out),
            // One loop for each activation, so that constants are not selected for every vector.
            Finish::Activate(activation) => match activation {
                Activation::Gelu => place.fill(simd, tile_sums, ActivateEpilogue(Activation::Gelu), out),
                Activation::GeluTanh => {
                    place.fill(simd, tile_sums, ActivateEpilogue(Activation::GeluTanh), out)
                }
                Activation::QuickGelu => {
                    place.fill(simd, tile_sums, ActivateEpilogue(Activation::QuickGelu), out)
                }
                Activation::Relu => place.fill(simd, tile_sums, ActivateEpilogue(Activation::Relu), out),
                Activation::Silu => place.fill(simd, tile_sums, ActivateEpilogue(Activation::Silu), out),
                Activation::Tanh => place.fill(simd, tile_sums, ActivateEpilogue(Activation::Tanh), out),
            },
            Finish::Gate(activation) => match activation {
                Activation::Gelu => place.fill(simd, tile_sums, GateEpilogue(Activation::Gelu), out),
                Activation::GeluTanh => place.fill(simd, tile_sums, GateEpilogue(Activation::GeluTanh), out),
                Activation::QuickGelu => {
                    place.fill(simd, tile_sums, GateEpilogue(Activation::QuickGelu), out)
                }
                Activation::Relu => place.fill(simd, tile_sums, GateEpilogue(Activation::Relu), out),
                Activation::Silu => place.fill(simd, tile_sums, GateEpilogue(Activation::Silu), out),
                Activation::Tanh => place.fill(simd, tile_sums, GateEpilogue(Activation::Tanh), out),
            },
        }
    }
}

/// Epilogue as a type: all its methods are inlined into the loop that is compiled for the instruction set, which
/// closures are not always.
trait Epilogue: Copy {
    /// Output columns of a panel.
    const COLUMNS: usize;

    /// Values that are common to all rows, from a column on.
    type Columns<S: Simd, R: TileSums>: Copy;

    fn columns<S: Simd, R: TileSums>(self, simd: S, tile_sums: &R, column: usize) -> Self::Columns<S, R>;

    /// Returns the output vector of this row of the tile from this column on; `before` is the previous content.
    fn value<S: Simd, R: TileSums>(
        self,
        simd: S,
        tile_sums: &R,
        row: usize,
        column: usize,
        columns: Self::Columns<S, R>,
        before: &[f32],
    ) -> S::Vector;
}

#[derive(Clone, Copy)]
struct StoreEpilogue;

#[derive(Clone, Copy)]
struct AddEpilogue;

#[derive(Clone, Copy)]
struct ActivateEpilogue(Activation);

#[derive(Clone, Copy)]
struct GateEpilogue(Activation);

/// Members of [`Epilogue`] for output of one panel's width.
macro_rules! whole_panel {
    () => {
        const COLUMNS: usize = PANEL;
        type Columns<S: Simd, R: TileSums> = R::Columns<S>;

        #[inline(always)]
        fn columns<S: Simd, R: TileSums>(self, simd: S, tile_sums: &R, column: usize) -> R::Columns<S> {
            tile_sums.columns(simd, column)
        }
    };
}

impl Epilogue for StoreEpilogue {
    whole_panel!();

    #[inline(always)]
    fn value<S: Simd, R: TileSums>(
        self,
        simd: S,
        tile_sums: &R,
        row: usize,
        column: usize,
        columns: R::Columns<S>,
        _before: &[f32],
    ) -> S::Vector {
        tile_sums.value(simd, row, column, columns)
    }
}

impl Epilogue for AddEpilogue {
    whole_panel!();

    #[inline(always)]
    fn value<S: Simd, R: TileSums>(
        self,
        simd: S,
        tile_sums: &R,
        row: usize,
        column: usize,
        columns: R::Columns<S>,
        before: &[f32],
    ) -> S::Vector {
        simd.add(tile_sums.value(simd, row, column, columns), load_up_to(simd, before, 0.0))
    }
}

impl Epilogue for ActivateEpilogue {
    whole_panel!();

    #[inline(always)]
    fn value<S: Simd, R: TileSums>(
        self,
        simd: S,
        tile_sums: &R,
        row: usize,
        column: usize,
        columns: R::Columns<S>,
        _before: &[f32],
    ) -> S::Vector {
        activate_sums::<S, R>(simd, self.0, tile_sums.value(simd, row, column, columns))
    }
}

impl Epilogue for GateEpilogue {
    const COLUMNS: usize = GATED_COLUMNS;
    /// Values of the gate, and of the gated output.
    type Columns<S: Simd, R: TileSums> = (R::Columns<S>, R::Columns<S>);

    #[inline(always)]
    fn columns<S: Simd, R: TileSums>(
        self,
        simd: S,
        tile_sums: &R,
        column: usize,
    ) -> (R::Columns<S>, R::Columns<S>) {
        (tile_sums.columns(simd, column), tile_sums.columns(simd, column + GATED_COLUMNS))
    }

    #[inline(always)]
    fn value<S: Simd, R: TileSums>(
        self,
        simd: S,
        tile_sums: &R,
        row: usize,
        column: usize,
        (of_gate, of_gated): (R::Columns<S>, R::Columns<S>),
        _before: &[f32],
    ) -> S::Vector {
        let gate = activate_sums::<S, R>(simd, self.0, tile_sums.value(simd, row, column, of_gate));
        simd.mul(gate, tile_sums.value(simd, row, column + GATED_COLUMNS, of_gated))
    }
}

#[inline(always)]
fn activate_sums<S: Simd, R: TileSums>(simd: S, activation: Activation, x: S::Vector) -> S::Vector {
    if R::COARSE { activate_coarse(simd, activation, x) } else { activate(simd, activation, x) }
}

/// Position of a tile's output.
struct TilePosition {
    rows: Range<usize>,
    /// First column in the window.
    first: usize,
}

impl TilePosition {
    /// Writes the output of a tile, into as many columns as the window has.
    #[inline(always)]
    fn fill<S: Simd, R: TileSums, B: Epilogue>(
        &self,
        simd: S,
        tile_sums: &R,
        epilogue: B,
        out: &mut Window<'_>,
    ) {
        let width = B::COLUMNS.min(out.columns().len() - self.first);
        // A separate window: writes through it cannot change the window itself, so its extent need not be reloaded.
        let mut out = out.reborrow();
        let mut column = 0;
        while column < width {
            let columns = epilogue.columns(simd, tile_sums, column);
            for index in 0..self.rows.len() {
                let row = &mut out.row_mut(self.rows.start + index)[self.first + column..];
                if column + S::LANES <= width {
                    let place = &mut row[..S::LANES];
                    simd.store(epilogue.value(simd, tile_sums, index, column, columns, place), place);
                } else {
                    let place = &mut row[..width - column];
                    store_up_to(simd, epilogue.value(simd, tile_sums, index, column, columns, place), place);
                }
            }
            column += S::LANES;
        }
    }
}

/// `out = finish(input · weights + bias)`, for the columns of `out`, which begin with a panel.
pub(in super::super) struct Product<'a, 'w> {
    pub(in super::super) input: MatrixView<'a>,
    pub(in super::super) weights: Panels<'a>,
    /// For all columns of all panels.
    pub(in super::super) bias: &'a [f32],
    pub(in super::super) finish: Finish,
    pub(in super::super) out: &'a mut Window<'w>,
    pub(in super::super) stage_ticks: &'a mut StageTicks,
}

impl Kernel for Product<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Product { input, weights, bias, finish, out, stage_ticks } = self;
        let mut lap = stage_ticks.begin();
        let panels = finish.panels(&out.columns());
        let (bias, _) = bias.as_chunks::<PANEL>();
        let mut sums = FloatSums::default();
        for index in panels.clone() {
            let panel = weights.panel(index);
            let next = weights.panel_if_any(index + 1);
            // The panel stays in a near cache while all rows are multiplied with it. Meanwhile the next one is
            // prefetched.
            let mut next = shares(next, input.rows().div_ceil(S::TILE_ROWS));
            for (start, rows) in tiles(input.rows(), S::TILE_ROWS) {
                let ahead = next.next().unwrap_or_default();
                let rows_ahead =
                    if index == panels.start { input.memory(start + rows..start + 2 * rows) } else { &[] };
                finish.prefetch_output(simd, out, start..start + rows, index);
                let (inputs, stride) = input.span(start..start + rows);
                Tile { inputs, stride, rows, lines: panel, columns: PANEL, ahead, rows_ahead }.sum(
                    simd,
                    sums.0.as_flattened_mut(),
                    PANEL,
                );
                lap = stage_ticks.end(ComputeStage::Products, lap);
                let tile_sums = BiasedSums { sums: &sums, bias: &bias[index] };
                finish.tile(simd, &tile_sums, out, start..start + rows, index);
                lap = stage_ticks.end(ComputeStage::Finish, lap);
            }
        }
    }
}

/// Int8 product: `out = finish(scale·(step·Σ + low·sum) + bias)`, as defined in [`crate::engine::cpu::byte_panels`].
pub(in super::super) struct ByteProduct<'a, 'w> {
    pub(in super::super) isa: Isa,
    pub(in super::super) input: &'a ByteRows,
    /// Rows of the input, one for each row of `out`.
    pub(in super::super) rows: Range<usize>,
    pub(in super::super) weights: BytePanels<'a>,
    /// For all columns of all panels.
    pub(in super::super) bias: &'a [f32],
    pub(in super::super) finish: Finish,
    pub(in super::super) out: &'a mut Window<'w>,
    pub(in super::super) stage_ticks: &'a mut StageTicks,
}

impl Kernel for ByteProduct<'_, '_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ByteProduct { isa, input, rows: of_input, weights, bias, finish, out, stage_ticks } = self;
        let mut lap = stage_ticks.begin();
        let dots = Dots::of(isa);
        let panels = finish.panels(&out.columns());
        let (bias, _) = bias.as_chunks::<PANEL>();
        let mut sums = WholeSums::default();
        for index in panels.clone() {
            let panel = weights.panel(index);
            let next = weights.panel_if_any(index + 1);
            let (scales, weight_sums, bias) = (weights.scales(index), weights.sums(index), &bias[index]);
            let mut next = shares(next, of_input.len().div_ceil(dots.tile_rows()));
            for (start, rows) in tiles(of_input.len(), dots.tile_rows()) {
                let ahead = next.next().unwrap_or_default();
                let (bytes, stride) = (input.bytes(), input.stride());
                finish.prefetch_output(simd, out, start..start + rows, index);
                dots.sum(
                    &ByteTile { bytes, stride, start: of_input.start + start, rows, panel, ahead },
                    &mut sums,
                );
                lap = stage_ticks.end(ComputeStage::Products, lap);
                let ranges = &input.ranges()[of_input.start + start..][..rows];
                let tile_sums = DequantizedSums { sums: &sums, ranges, scales, weight_sums, bias };
                finish.tile(simd, &tile_sums, out, start..start + rows, index);
                lap = stage_ticks.end(ComputeStage::Finish, lap);
            }
        }
    }
}

/// Divides data to prefetch into one share for each of `tiles` tiles.
#[inline(always)]
fn shares<T>(next: &[T], tiles: usize) -> std::slice::Chunks<'_, T> {
    next.chunks(next.len().div_ceil(tiles.max(1)).max(1))
}
