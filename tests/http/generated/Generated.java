// What each class of a generated client is marked with. The JDK has lacked it since version 11.

package javax.annotation;

public @interface Generated {
    String[] value();
    String date() default "";
    String comments() default "";
}
