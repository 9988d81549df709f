//! Labels: closed sets of values, and the families of metrics that have them. The labels of a metric are its nested
//! families, outermost first.

use crate::declaration::MetricKind;
use crate::snapshot::Metric;
use crate::snapshot::Samples;
use crate::value::Counter;
use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

/// Closed set of label values. `In` is a type of the crate that implements the trait, so that it can do so for an enum
/// of another crate; the sets that [`labels!`](crate::labels) declares are implemented for all.
pub trait Label<In>: Copy {
    /// Returns all values.
    fn values() -> Vec<&'static str>;

    /// Returns its position in the values.
    fn index(self) -> usize;
}

/// The first value stands for `None`: the label is not known.
impl<In, L: Label<In>> Label<In> for Option<L> {
    fn values() -> Vec<&'static str> {
        [vec!["unknown"], L::values()].concat()
    }

    fn index(self) -> usize {
        self.map_or(0, |label| 1 + label.index())
    }
}

/// Declares an enum of label values, with `ALL` and `as_str`.
#[macro_export]
macro_rules! labels {
    ($(#[$attr:meta])* $vis:vis enum $set:ident {
        $($(#[$variant_attr:meta])* $variant:ident = $value:expr,)+
    }) => {
        $(#[$attr])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        $vis enum $set { $($(#[$variant_attr])* $variant,)+ }

        impl $set {
            /// All values.
            $vis const ALL: [$set; [$($value),+].len()] = [$($set::$variant),+];

            /// Returns the value of the label.
            $vis fn as_str(self) -> &'static str {
                match self { $($set::$variant => $value,)+ }
            }
        }

        impl<In> $crate::Label<In> for $set {
            fn values() -> Vec<&'static str> {
                $set::ALL.iter().map(|value| value.as_str()).collect()
            }

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

/// Implements [`Label`] in this crate for enums that have `ALL`, in the order of the variants, and `as_str`.
#[macro_export]
macro_rules! labels_of {
    ($in:ty: $($set:ty),+ $(,)?) => {
        $(impl $crate::Label<$in> for $set {
            fn values() -> Vec<&'static str> {
                <$set>::ALL.iter().map(|value| value.as_str()).collect()
            }

            fn index(self) -> usize {
                self as usize
            }
        })+
    };
}

/// One metric for each value of a label.
#[derive(Debug)]
pub struct Family<L, M = Counter, In = ()> {
    metrics: Box<[M]>,
    label: PhantomData<fn(L, In)>,
}

impl<In, L: Label<In>, M: Default> Default for Family<L, M, In> {
    fn default() -> Family<L, M, In> {
        Family { metrics: L::values().iter().map(|_| M::default()).collect(), label: PhantomData }
    }
}

/// From one metric for each value, in the order of the values.
impl<In, L: Label<In>, M> FromIterator<M> for Family<L, M, In> {
    fn from_iter<I: IntoIterator<Item = M>>(metrics: I) -> Family<L, M, In> {
        Family { metrics: metrics.into_iter().collect(), label: PhantomData }
    }
}

impl<In, L: Label<In>, M> Family<L, M, In> {
    /// Returns the metric of a label.
    pub fn of(&self, label: L) -> &M {
        &self.metrics[label.index()]
    }

    /// Returns all metrics, in the order of the values.
    pub fn iter(&self) -> impl Iterator<Item = &M> {
        self.metrics.iter()
    }
}

impl<In, L: Label<In>> Family<L, Counter, In> {
    /// Adds one to the counter of a label.
    pub fn count(&self, label: L) {
        self.of(label).add(1);
    }
}

impl<In, L: Label<In>, M: Metric> Metric for Family<L, M, In> {
    const KIND: MetricKind = M::KIND;
    const LABELS: usize = M::LABELS + 1;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        values.push(Some(L::values()));
        M::label_values(values);
    }

    fn sample(&self, to: &mut Samples<'_>) {
        for (value, metric) in L::values().into_iter().zip(&self.metrics) {
            to.labelled(value, |to| metric.sample(to));
        }
    }
}

/// Gauge of a state: 1 for the current one, 0 for the others.
#[derive(Clone, Copy, Debug)]
pub struct OneOf<L, In = ()>(L, PhantomData<fn(In)>);

impl<In, L: Label<In>> OneOf<L, In> {
    /// Returns the gauge with this current state.
    pub fn new(current: L) -> OneOf<L, In> {
        OneOf(current, PhantomData)
    }
}

impl<In, L: Label<In>> Metric for OneOf<L, In> {
    const KIND: MetricKind = MetricKind::Gauge;
    const LABELS: usize = 1;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        values.push(Some(L::values()));
    }

    fn sample(&self, to: &mut Samples<'_>) {
        for (at, value) in L::values().into_iter().enumerate() {
            to.labelled(value, |to| to.value(u8::from(at == self.0.index())));
        }
    }
}

/// Family of which only the samples that are not zero are written, for labels with many combinations. The first is
/// always written if `FIRST`.
#[derive(Debug, Default)]
pub struct Sparse<M, const FIRST: bool = true>(pub M);

impl<M: Metric, const FIRST: bool> Metric for Sparse<M, FIRST> {
    const KIND: MetricKind = M::KIND;
    const LABELS: usize = M::LABELS;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        M::label_values(values);
    }

    fn sample(&self, to: &mut Samples<'_>) {
        to.without_zeros(FIRST, |to| self.0.sample(to));
    }
}

/// One metric for each name from the configuration, at the time of a scrape.
#[derive(Debug)]
pub struct ByName<M>(Vec<(String, M)>);

impl<N: ToString, M> FromIterator<(N, M)> for ByName<M> {
    fn from_iter<I: IntoIterator<Item = (N, M)>>(all: I) -> ByName<M> {
        ByName(all.into_iter().map(|(name, metric)| (name.to_string(), metric)).collect())
    }
}

impl<M: Metric> Metric for ByName<M> {
    const KIND: MetricKind = M::KIND;
    const LABELS: usize = M::LABELS + 1;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        values.push(None);
        M::label_values(values);
    }

    fn sample(&self, to: &mut Samples<'_>) {
        for (name, metric) in &self.0 {
            to.labelled(name, |to| metric.sample(to));
        }
    }
}

/// One metric for each of a list of names, found by its index and allocated on first use: a catalogue has hundreds of
/// regions, of which a fleet uses a few.
#[derive(Debug, Default)]
pub struct ByIndex<M> {
    names: Arc<[String]>,
    metrics: Box<[OnceLock<Box<M>>]>,
}

impl<M: Default> ByIndex<M> {
    /// Creates a family without a metric.
    pub fn new(names: &Arc<[String]>) -> ByIndex<M> {
        ByIndex { names: names.clone(), metrics: names.iter().map(|_| OnceLock::new()).collect() }
    }

    /// Returns the metric of an index.
    pub fn of(&self, at: usize) -> &M {
        self.metrics[at].get_or_init(Box::default)
    }
}

impl<M: Metric> Metric for ByIndex<M> {
    const KIND: MetricKind = M::KIND;
    const LABELS: usize = M::LABELS + 1;

    fn label_values(values: &mut Vec<Option<Vec<&'static str>>>) {
        values.push(None);
        M::label_values(values);
    }

    fn sample(&self, to: &mut Samples<'_>) {
        for (name, metric) in self.names.iter().zip(&self.metrics) {
            metric.get().into_iter().for_each(|metric| to.labelled(name, |to| metric.sample(to)));
        }
    }
}
