//! Tables of a file whose keys are declared: [`section!`].

use std::fmt;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::document::ConfigFile;
use crate::suggest::did_you_mean;

/// Table with declared keys, as [`section!`] defines it.
pub trait Section: Sized {
    /// Description, for the reference.
    const ABOUT: &'static str;
    /// Names of the keys.
    const NAMES: &'static [&'static str];

    /// Returns the declarations of the keys, for the reference.
    fn keys() -> Vec<Key>;

    /// Reads the keys; `None` after a problem.
    fn read_keys(table: &Table<'_>) -> Option<Self>;
}

/// Value of a key, with its position.
pub struct ConfigField<'d> {
    /// File.
    pub document: &'d ConfigFile<'d>,
    /// Path of the key.
    pub path: String,
    /// Value in the file.
    pub value: &'d Spanned<DeValue<'d>>,
}

/// Type that can be the value of a key.
pub trait ConfigValue: Sized {
    /// Type of the limits that a declaration may set.
    type Limit: fmt::Display + Default + Clone;
    /// Type to which a declaration's check applies: of an optional value or a list, that of the value or of each item.
    type Item;

    /// Returns the type's name in the reference, such as `duration`.
    fn type_name() -> String;

    /// Reads the value; `None` after a problem, which has been recorded.
    fn read(field: &ConfigField<'_>, rule: &Rule<Self>) -> Option<Self>;

    /// Returns the value of an absent key that has no default in its declaration.
    fn absent() -> Option<Self> {
        None
    }

    /// Returns the section of the tables that this value consists of, for the reference.
    fn section() -> Option<(&'static str, Vec<crate::Key>)> {
        None
    }

    /// Returns the value as it is written in a file.
    fn written(&self) -> String {
        String::new()
    }
}

impl<'d> ConfigField<'d> {
    /// Records a problem of this value.
    pub fn problem(&self, message: impl fmt::Display) {
        self.document.problem(&self.path, message);
    }

    /// Records that the value has the wrong type, with the fix.
    pub fn wrong_type(&self, fix: &str) {
        let kind = match self.value.get_ref() {
            // Not shown: it might be a secret at the wrong place.
            DeValue::String(_) => "is a string".to_owned(),
            DeValue::Integer(number) => format!("{} is a number", number.as_str()),
            DeValue::Float(number) => format!("{} is a number", number.as_str()),
            DeValue::Boolean(value) => format!("{value} is true or false"),
            DeValue::Datetime(_) => "is a date".to_owned(),
            DeValue::Array(_) => "is a list".to_owned(),
            DeValue::Table(_) => "is a table".to_owned(),
        };
        self.problem(format!("{kind}; write {fix}"));
    }

    /// Returns the value as a string, or records a problem.
    pub fn text(&self) -> Option<&'d str> {
        let text = self.value.get_ref().as_str();
        if text.is_none() {
            self.wrong_type("a string in quotes");
        }
        text
    }

    /// Returns the value as a number, or records a problem.
    pub(crate) fn number<T: std::str::FromStr>(&self, fix: &str, fractions: bool) -> Option<T> {
        let written = match self.value.get_ref() {
            DeValue::Integer(integer) if integer.radix() == 10 => integer.as_str(),
            DeValue::Float(float) => float.as_str(),
            _ => {
                self.wrong_type(fix);
                return None;
            }
        };
        let number = written.parse().ok();
        if number.is_none() {
            let problem = if fractions { "is not a number" } else { "is out of range" };
            self.problem(format!("{written} {problem}; write {fix}"));
        }
        number
    }

    /// Returns the items of a list, or records a problem.
    pub fn items(&self, fix: &str) -> Option<Vec<ConfigField<'d>>> {
        let Some(list) = self.value.get_ref().as_array() else {
            self.wrong_type(fix);
            return None;
        };
        let item = |(index, value)| ConfigField {
            document: self.document,
            path: format!("{}[{index}]", self.path),
            value,
        };
        Some(list.iter().enumerate().map(item).collect())
    }

    /// Returns the value as a table, or records a problem.
    pub fn table(&self) -> Option<Table<'d>> {
        let Some(entries) = self.value.get_ref().as_table() else {
            self.wrong_type("a table");
            return None;
        };
        Some(Table { document: self.document, path: self.path.clone(), entries, span: self.value.span() })
    }

    /// Applies the check of a declaration.
    pub fn checked<T: ConfigValue>(&self, value: T, check: Option<Check<T>>) -> Option<T> {
        match check.map_or(Ok(()), |check| check(&value)) {
            Ok(()) => Some(value),
            Err(problem) => {
                self.problem(format!("{} {problem}", value.written()).trim_start());
                None
            }
        }
    }
}

/// Declaration of a key, for the reference.
#[derive(Clone, Debug)]
pub struct Key {
    pub(crate) name: &'static str,
    pub(crate) about: String,
    pub(crate) type_name: String,
    /// Default value as written in a file; `None` for a key that is required, or optional without a default.
    pub(crate) default: Option<String>,
    pub(crate) is_required: bool,
    pub(crate) limits: String,
    pub(crate) section: Option<(&'static str, Vec<Key>)>,
}

impl Key {
    /// Creates the declaration of a key of type `T`.
    pub fn of<T: ConfigValue>(name: &'static str, about: &[&str], rule: &Rule<T>) -> Key {
        Key {
            name,
            about: about.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" "),
            type_name: T::type_name(),
            default: rule.default.as_ref().map(T::written).filter(|written| !written.is_empty()),
            is_required: rule.default.is_none() && T::absent().is_none(),
            limits: rule.limit.to_string(),
            section: T::section(),
        }
    }
}

/// Check of a value: the error continues a sentence that begins with the value.
pub type Check<T> = fn(&T) -> Result<(), String>;

/// Rule for the value of a key.
pub struct Rule<T: ConfigValue> {
    /// Value of an absent key.
    pub default: Option<T>,
    /// Limits.
    pub limit: T::Limit,
    /// Further check of the value, or of each item.
    pub check: Option<Check<T::Item>>,
    /// Example of a value, as written in a file.
    pub example: &'static str,
    /// Additional fix, which is appended to that of the limits.
    pub fix: &'static str,
}

impl<T: ConfigValue> Default for Rule<T> {
    fn default() -> Rule<T> {
        Rule { default: None, limit: T::Limit::default(), check: None, example: "", fix: "" }
    }
}

impl<T: ConfigValue> Rule<T> {
    /// Returns the rule of the value in an `Option`.
    pub(crate) fn same<I: ConfigValue<Item = T::Item, Limit = T::Limit>>(&self) -> Rule<I> {
        Rule {
            default: None,
            limit: self.limit.clone(),
            check: self.check,
            example: self.example,
            fix: self.fix,
        }
    }

    /// Returns the rule of the items of a list.
    pub(crate) fn items<I: ConfigValue<Item = T::Item>>(&self) -> Rule<I> {
        Rule { check: self.check, example: self.example, ..Rule::default() }
    }

    /// Returns the additional fix, with a comma.
    pub(crate) fn hint(&self) -> String {
        if self.fix.is_empty() { String::new() } else { format!(", {}", self.fix) }
    }
}

/// Returns the section of which all keys are absent; `None` if some are required.
pub fn of_defaults<T: Section>() -> Option<T> {
    if T::keys().iter().any(|key| key.is_required) {
        return None;
    }
    ConfigFile::read("", |document| document.section()).ok()
}

/// Table being read.
pub struct Table<'d> {
    pub(crate) document: &'d ConfigFile<'d>,
    pub(crate) path: String,
    pub(crate) entries: &'d DeTable<'d>,
    pub(crate) span: Range<usize>,
}

impl Table<'_> {
    /// Reads the table as a section, and records unknown keys.
    pub fn read<T: Section>(&self) -> Option<T> {
        for key in self.entries.keys() {
            let name = key.get_ref().as_ref();
            if !T::NAMES.contains(&name) {
                let hint = did_you_mean(name, T::NAMES.iter().copied());
                let keys = T::NAMES.join(", ");
                let message = format!("unknown key `{name}`{hint}; the keys are {keys}");
                self.document.problem_at(key.span(), &self.key_path(name), message);
            }
        }
        T::read_keys(self)
    }

    /// Reads the value of a key.
    pub fn key<T: ConfigValue>(&self, name: &'static str, rule: Rule<T>) -> Option<T> {
        let path = self.key_path(name);
        if let Some(value) = self.entries.get(name) {
            return T::read(&ConfigField { document: self.document, path, value }, &rule);
        }
        let example = rule.example;
        rule.default.or_else(T::absent).or_else(|| {
            let fix = match T::type_name().as_str() {
                "list of tables" => format!("tables headed [[{name}]]"),
                type_name if example.is_empty() => format!("{name} = … ({type_name})"),
                _ => format!("{name} = {example}"),
            };
            self.document.problem_at(self.span.clone(), &path, format!("is missing; write {fix}"));
            None
        })
    }

    fn key_path(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }
}

impl ConfigFile<'_> {
    /// Reads the whole file as one section.
    pub fn section<T: Section>(&self) -> Option<T> {
        Table { document: self, path: String::new(), entries: self.tree.get_ref(), span: 0..0 }.read()
    }
}

/// Declares a section: a struct, its parser, its messages and its entry of the reference.
///
/// ```text
/// section! {
///     /// Timeouts of client connections.
///     #[derive(Clone)]
///     pub struct Timeouts {
///         /// Idle time of a connection.
///         pub idle: Duration = Duration::from_secs(75), in MIN..=MAX;
///     }
/// }
/// ```
///
/// After the type follow, each optional: `= DEFAULT`; `in LIMITS`, of a number, a duration, or the length of a list;
/// `like "EXAMPLE"`, for the message about a missing key; `fix "TEXT"`, appended to the fix; `check FUNCTION`, for the
/// value or each item. A key with neither a default nor an `Option` type is required.
///
/// The fields of a `partial struct` are in `Option`s, which are `None` after a problem: so the keys that are valid can be
/// checked further, and all problems are reported together.
#[macro_export]
macro_rules! section {
    ($(#[doc = $about:literal])* $(#[derive($($derive:ident),* $(,)?)])? $vis:vis partial struct $name:ident {$(
        $(#[doc = $doc:literal])*
        $field_vis:vis $key:ident $(($written:literal))? : $type:ty
            $(= $default:expr)? $(, in $limit:expr)? $(, like $example:literal)? $(, fix $fix:literal)? $(, check $check:ident)?;
    )*}) => {
        $(#[doc = $about])*
        $(#[derive($($derive),*)])?
        $vis struct $name { $($(#[doc = $doc])* $field_vis $key: Option<$type>),* }

        $crate::section! { @traits $name [$($about),*] table [Some($name {
            $($key: table.key::<$type>(
                $crate::section!(@name $key $($written)?),
                $crate::section!(@rule $($default)?; $($limit)?; $($example)?; $($fix)?; $($check)?),
            )),*
        })] $(
            [$($doc),*] [$crate::section!(@name $key $($written)?)] $type,
            [$crate::section!(@rule $($default)?; $($limit)?; $($example)?; $($fix)?; $($check)?)];
        )* }
    };
    ($(#[doc = $about:literal])* $(#[derive($($derive:ident),* $(,)?)])? $vis:vis struct $name:ident {$(
        $(#[doc = $doc:literal])*
        $field_vis:vis $key:ident $(($written:literal))? : $type:ty
            $(= $default:expr)? $(, in $limit:expr)? $(, like $example:literal)? $(, fix $fix:literal)? $(, check $check:ident)?;
    )*}) => {
        $(#[doc = $about])*
        $(#[derive($($derive),*)])?
        $vis struct $name { $($(#[doc = $doc])* $field_vis $key: $type),* }

        $crate::section! { @traits $name [$($about),*] table [{
            $(let $key = table.key::<$type>(
                $crate::section!(@name $key $($written)?),
                $crate::section!(@rule $($default)?; $($limit)?; $($example)?; $($fix)?; $($check)?),
            );)*
            Some($name { $($key: $key?),* })
        }] $(
            [$($doc),*] [$crate::section!(@name $key $($written)?)] $type,
            [$crate::section!(@rule $($default)?; $($limit)?; $($example)?; $($fix)?; $($check)?)];
        )* }
    };
    (@traits $name:ident [$($about:literal),*] $table:ident [$read:expr] $(
        [$($doc:literal),*] [$written:expr] $type:ty, [$rule:expr];
    )*) => {
        impl $crate::Section for $name {
            const ABOUT: &'static str = concat!($($about),*);
            const NAMES: &'static [&'static str] = &[$($written),*];

            fn keys() -> Vec<$crate::Key> {
                vec![$($crate::Key::of::<$type>($written, &[$($doc),*], &$rule)),*]
            }

            fn read_keys($table: &$crate::Table<'_>) -> Option<$name> {
                $read
            }
        }

        impl $crate::ConfigValue for $name {
            type Limit = $crate::NoLimit;
            type Item = $name;

            fn type_name() -> String {
                "table".to_owned()
            }

            fn read(field: &$crate::ConfigField<'_>, rule: &$crate::Rule<$name>) -> Option<$name> {
                field.checked(field.table()?.read::<$name>()?, rule.check)
            }

            fn absent() -> Option<$name> {
                $crate::of_defaults()
            }

            fn section() -> Option<(&'static str, Vec<$crate::Key>)> {
                Some((<$name as $crate::Section>::ABOUT, <$name as $crate::Section>::keys()))
            }
        }
    };
    (@name $key:ident) => { stringify!($key) };
    (@name $key:ident $written:literal) => { $written };
    (@rule $($default:expr)?; $($limit:expr)?; $($example:literal)?; $($fix:literal)?; $($check:ident)?) => {
        $crate::Rule {
            $(default: Some($default),)?
            $(limit: ($limit).into(),)?
            $(example: $example,)?
            $(fix: $fix,)?
            $(check: Some(|value| $check(value)),)?
            ..$crate::Rule::default()
        }
    };
}
