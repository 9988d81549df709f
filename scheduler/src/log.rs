//! Declaration of log events: a table of structs, each of which owns its log line.

/// Declares a struct for each event, whose `emit` writes the log line. The doc comment is the meaning of the event in
/// `docs/events.md`.
macro_rules! events {
    ($(
        $(#[$doc:meta])+
        $level:ident!($($log:tt)*)
        $name:ident $(<$life:lifetime>)? { $($field:ident: $type:ty),+ $(,)? }
    )+) => {$(
        $(#[$doc])+
        pub(crate) struct $name $(<$life>)? {
            $(pub(crate) $field: $type),+
        }

        impl $(<$life>)? $name $(<$life>)? {
            pub(crate) fn emit(self) {
                let $name { $($field),+ } = self;
                tracing::$level!($($log)*);
            }
        }
    )+};
}
pub(crate) use events;
